"""Background tasks: work that concurrent callers share, and tasks that end with their owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Work that runs once for all concurrent callers, and continues if one of them is cancelled."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> None:
        """Create a flight for ``work``, which `start` and `join` run in a task called ``name``."""
        self._work = work
        self._name = name
        self._task: asyncio.Task[T] | None = None
        self._closed = False

    def start(self) -> asyncio.Task[T]:
        """Return the task that runs the work; start a task if none is running."""
        if self._task is None or not self.under_way:
            self._task = asyncio.create_task(self._work(), name=self._name)
            self._task.add_done_callback(_retrieve)
            if self._closed:
                self._task.cancel()
        return self._task

    @property
    def under_way(self) -> bool:
        """Whether the work is running."""
        return self._task is not None and not self._task.done()

    async def join(self) -> T | None:
        """Start the work unless it is running, and return its result, or None after `aclose`.

        Raises the exception of the work.
        """
        task = self.start()
        await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    async def aclose(self) -> None:
        """Cancel the running work, and prevent later starts."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        # Mark the exception as retrieved: otherwise asyncio logs it if every caller was cancelled.
        task.exception()


_log = logging.getLogger("taskqueue.redis")


class BackgroundTasks:
    """The background tasks of one owner. `aclose` cancels them. The exception of a failed task is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def drained(self) -> None:
        """Wait until every task has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Cancel every task and wait until all have ended."""
        for task in self._tasks:
            task.cancel()
        await self.drained()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("background work failed", exc_info=error)
