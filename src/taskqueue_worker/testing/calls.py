"""Blocking calls and waits of the code under test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from threading import get_ident
from typing import Any, TypeVar

from taskqueue_core.capabilities import Control
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.task_ends import TaskEnds, has_ended
from taskqueue_core.tasks import TaskStatus

T = TypeVar("T")
_WOULD_BLOCK = (
    "a blocking call would have to wait in the thread of the event loop, which must run the tasks: call the code under "
    "test in another thread, as in 'await asyncio.to_thread(place_order, 17)', or await the async method"
)


class TestCalls:
    """Runs the blocking calls of the code under test, in whatever thread they are made."""

    def __init__(self) -> None:
        """Run calls in the thread that makes them, until `loop` is set."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """the event loop in which the test or a worker runs, if it is known"""
        self._blocked_thread: int | None = None

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result. Raises `TaskQueueError` if it would block an event loop."""
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - get_running_loop raises an error without a loop
            self._blocked_thread = get_ident()
            try:
                return finish(coroutine)
            finally:
                self._blocked_thread = None
        if self.loop is not None and self.loop.is_running():
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        return asyncio.run(coroutine)

    def check_wait(self) -> None:
        """Raise `TaskQueueError` if this is part of a blocking call in the thread of an event loop."""
        if self._blocked_thread == get_ident():
            raise TaskQueueError(_WOULD_BLOCK)


class TestEnds(TaskEnds):
    """Waits for the ends of tasks, in any event loop. A wait for a task that has ended returns at once."""

    def __init__(self, control: Control, calls: TestCalls) -> None:
        """Create it for a connection whose blocking calls are made by ``calls``."""
        super().__init__(control)
        self._calls = calls

    async def wait(
        self, key: str, task_id: str, *, wait_for_redrive: bool = False
    ) -> TaskStatus | None:
        (status,) = await self._control.statuses(key, task_id)
        if has_ended(status, wait_for_redrive=wait_for_redrive):
            return status
        self._calls.check_wait()
        # Each blocking call may have its own event loop, so waits share nothing.
        return await TaskEnds(self._control).wait(key, task_id, wait_for_redrive=wait_for_redrive)


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not wait for anything, and return its result. Raises `TaskQueueError` if it does."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise TaskQueueError(_WOULD_BLOCK)
