"""Signals for publishers that wait until a full queue may accept tasks again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from taskqueue_core.clock import Clock


class RoomNotifier:
    """The open signals of each queue, and, for each queue, the queues whose tasks are copied into it (fan-out)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.open: dict[str, dict[MemoryRoomSignal, None]] = {}
        self._sources: dict[str, set[str]] = {}

    def bind(self, key: str, before: Iterable[str], after: Iterable[str]) -> None:
        """Record that tasks published to ``key`` are now copied to the queues ``after`` instead of ``before``."""
        for target in set(before):
            self._sources[target].discard(key)
            if not self._sources[target]:
                del self._sources[target]
        for target in after:
            self._sources.setdefault(target, set()).add(key)

    def notify(self, key: str) -> None:
        """Notify the signals of a queue, and of the queues whose tasks are copied into it."""
        for name in (key, *self._sources.get(key, ())):
            for signal in self.open.get(name, ()):
                signal.notify()


class MemoryRoomSignal:
    """A signal that some queues may accept tasks again, or that slots of some models may be free."""

    def __init__(self, signals: RoomNotifier, keys: tuple[str, ...]) -> None:
        self._signals = signals
        self._keys = keys
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """End the wait in progress. If no wait is in progress, the next wait returns at once."""
        self._notified.set()

    async def wait(self, timeout: float) -> None:
        if timeout > 0:
            clock = self._signals.clock
            timer = clock.call_at(clock.now() + timeout, self.notify)
            try:
                await self._notified.wait()
            finally:
                timer.cancel()
        self._notified.clear()

    async def __aenter__(self) -> Self:
        for key in self._keys:
            self._signals.open.setdefault(key, {})[self] = None
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in self._keys:
            signals = self._signals.open.get(key, {})
            signals.pop(self, None)
            if not signals:
                self._signals.open.pop(key, None)
