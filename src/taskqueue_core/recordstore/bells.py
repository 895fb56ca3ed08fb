"""The bells that ring for publishers when a queue may have room."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Self

__all__ = ["Bells", "RecordBell"]


class Bells:
    """The open bells, by key."""

    def __init__(self) -> None:
        """Start without any."""
        self._by_key: dict[str, set[RecordBell]] = {}

    def hang(self, bell: RecordBell) -> None:
        """Note an open one."""
        for key in bell.keys:
            self._by_key.setdefault(key, set()).add(bell)

    def take_down(self, bell: RecordBell) -> None:
        """Forget a closed one; once more is harmless."""
        for key in bell.keys:
            here = self._by_key.get(key, set())
            here.discard(bell)
            if not here:
                self._by_key.pop(key, None)

    def ring(self, keys: Iterable[str]) -> None:
        """Ring those of some keys."""
        for key in keys:
            for bell in self._by_key.get(key, ()):
                bell.ring()


class RecordBell:
    """See `taskqueue_core.capabilities.RoomBell`."""

    def __init__(self, bells: Bells, keys: tuple[str, ...]) -> None:
        """Ring with ``bells`` once it is open."""
        self.keys = keys
        self._bells = bells
        self._rang = asyncio.Event()

    def ring(self) -> None:
        """Wake who waits, or who waits next."""
        self._rang.set()

    async def rung(self, timeout: float) -> None:
        """See `taskqueue_core.capabilities.RoomBell.rung`. The seconds are real: nobody waits for the store here."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._rang.wait()
        self._rang.clear()

    async def __aenter__(self) -> Self:
        """Open it."""
        self._rang.clear()
        self._bells.hang(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        self._bells.take_down(self)
