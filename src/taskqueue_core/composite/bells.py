"""A bell that rings when one of several does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import RoomBell

__all__ = ["JointBell"]


class JointBell:
    """See `taskqueue_core.capabilities.RoomBell`."""

    def __init__(self, backends: Sequence[Backend], keys: Sequence[Sequence[str]]) -> None:
        """Listen to some queues of each backend that has bells."""
        publishers: list[Any] = [backend.publisher for backend in backends]
        self._bells: list[RoomBell] = [
            publisher.room_bell(*some)
            for publisher, some in zip(publishers, keys, strict=True)
            if some and hasattr(publisher, "room_bell")
        ]
        self._open = AsyncExitStack()

    async def rung(self, timeout: float) -> None:
        """Wait until one has rung, up to ``timeout`` seconds."""
        waits = [asyncio.ensure_future(bell.rung(timeout)) for bell in self._bells]
        if not waits:
            await asyncio.sleep(timeout)
            return
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        for one in done:
            one.result()

    async def __aenter__(self) -> Self:
        """Open all."""
        async with AsyncExitStack() as opened:
            for bell in self._bells:
                await opened.enter_async_context(bell)
            self._open = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all."""
        await self._open.aclose()
