"""Work that several callers need at the same time, and that is done once for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Flight(Generic[T]):
    """Work that belongs to nobody: a caller that is cancelled does not take it from the others."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> None:
        """Do nothing yet."""
        self._work = work
        self._name = name
        self._task: asyncio.Task[T] | None = None
        self._closed = False

    def start(self) -> asyncio.Task[T]:
        """Begin, unless it is under way."""
        if self._task is None or not self.under_way:
            self._task = asyncio.create_task(self._work(), name=self._name)
            self._task.add_done_callback(_retrieve)
            if self._closed:
                self._task.cancel()
        return self._task

    @property
    def under_way(self) -> bool:
        """Whether it has begun and not ended."""
        return self._task is not None and not self._task.done()

    async def join(self) -> T | None:
        """Return the result of what is under way, else begin; None if it was closed. Raises what the work raises."""
        task = self.start()
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    async def aclose(self) -> None:
        """Cancel it, and let nothing begin any more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # whoever waited was told; if all of them left, nobody needs to be


_log = logging.getLogger("taskqueue.redis")


class Owned:
    """Tasks that are kept until they end, and ended with their owner. One that fails is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def drained(self) -> None:
        """Wait for what is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """End everything."""
        for task in self._tasks:
            task.cancel()
        await self.drained()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background work failed", exc_info=error)
