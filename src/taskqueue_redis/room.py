"""Waiting for room in queues, or for slots: a bell on the doorbell of the process."""

from __future__ import annotations

import asyncio
from typing import Self

from taskqueue_redis.connection.errors import translated
from taskqueue_redis.wakeups import Wakeups

__all__ = ["RedisRoomBell"]


class RedisRoomBell:
    """See `taskqueue_core.capabilities.RoomBell`."""

    def __init__(self, wakeups: Wakeups, channels: tuple[str, ...]) -> None:
        """Do no input or output."""
        self.channels = channels
        self._wakeups = wakeups
        self._rang = asyncio.Event()

    def ring(self) -> None:
        """Say that there may be room."""
        self._rang.set()

    async def rung(self, timeout: float) -> None:
        """See `taskqueue_core.capabilities.RoomBell.rung`."""
        try:
            async with asyncio.timeout(timeout):
                await self._rang.wait()
        except TimeoutError:
            return
        self._rang.clear()

    async def __aenter__(self) -> Self:
        """Return it once no ring can be missed."""
        try:
            with translated():
                await self._wakeups.attend_bell(self)
        except BaseException:
            self._wakeups.leave_bell(self)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ring no more."""
        self._wakeups.leave_bell(self)
