"""Bells for publishers that wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from taskqueue_core.clock import Clock

__all__ = ["Bells", "MemoryRoomBell"]


class Bells:
    """The open bells by queue, and who publishes to a queue by way of another one."""

    def __init__(self, clock: Clock) -> None:
        """Start with none."""
        self.clock = clock
        self.open: dict[str, dict[MemoryRoomBell, None]] = {}
        self._sources: dict[str, set[str]] = {}

    def bind(self, key: str, before: Iterable[str], after: Iterable[str]) -> None:
        """Note that what is published to ``key`` goes to other queues from now on."""
        for target in set(before):
            self._sources[target].discard(key)
            if not self._sources[target]:
                del self._sources[target]
        for target in after:
            self._sources.setdefault(target, set()).add(key)

    def ring(self, key: str) -> None:
        """Ring for a queue, and for those that are bound to it."""
        for name in (key, *self._sources.get(key, ())):
            for bell in self.open.get(name, ()):
                bell.ring()


class MemoryRoomBell:
    """See `taskqueue_core.capabilities.RoomBell`."""

    def __init__(self, bells: Bells, keys: tuple[str, ...]) -> None:
        self._bells = bells
        self._keys = keys
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake who waits, or who is about to."""
        self._rung.set()

    async def rung(self, timeout: float) -> None:
        """See `taskqueue_core.capabilities.RoomBell.rung`."""
        if timeout > 0:
            clock = self._bells.clock
            timer = clock.call_at(clock.now() + timeout, self.ring)
            try:
                await self._rung.wait()
            finally:
                timer.cancel()
        self._rung.clear()

    async def __aenter__(self) -> Self:
        for key in self._keys:
            self._bells.open.setdefault(key, {})[self] = None
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in self._keys:
            bells = self._bells.open.get(key, {})
            bells.pop(self, None)
            if not bells:
                self._bells.open.pop(key, None)
