"""Signals for publishers that wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from taskqueue_core.clock import Clock


class RoomNotifier:
    """The open signals by queue, and the queues from which copies go to other queues."""

    def __init__(self, clock: Clock) -> None:
        """Start with none."""
        self.clock = clock
        self.open: dict[str, dict[MemoryRoomSignal, None]] = {}
        self._sources: dict[str, set[str]] = {}

    def bind(self, key: str, before: Iterable[str], after: Iterable[str]) -> None:
        """Note that what is published to ``key`` goes to other queues from now on."""
        for target in set(before):
            self._sources[target].discard(key)
            if not self._sources[target]:
                del self._sources[target]
        for target in after:
            self._sources.setdefault(target, set()).add(key)

    def notify(self, key: str) -> None:
        """Notify the signals of a queue and of those that are bound to it."""
        for name in (key, *self._sources.get(key, ())):
            for signal in self.open.get(name, ()):
                signal.notify()


class MemoryRoomSignal:
    """See `taskqueue_core.capabilities.RoomSignal`."""

    def __init__(self, signals: RoomNotifier, keys: tuple[str, ...]) -> None:
        self._signals = signals
        self._keys = keys
        self._notified = asyncio.Event()

    def notify(self) -> None:
        """Wake the waiter, or the next one."""
        self._notified.set()

    async def wait(self, timeout: float) -> None:
        """See `taskqueue_core.capabilities.RoomSignal.wait`."""
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
