"""Blocking calls and waits of the code under test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from taskqueue_core.capabilities import Control
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.task_ends import TaskEnds, has_ended
from taskqueue_core.tasks import State, TaskStatus
from taskqueue_worker.testing.drained import NotDrained

T = TypeVar("T")
_PAUSE, _LOOKS = 0.02, 250
"""seconds between two looks at a task that is awaited, and the number of looks without a drain that end the wait"""
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
            self._blocked_thread = threading.get_ident()
            try:
                return finish(coroutine)
            finally:
                self._blocked_thread = None
        if self.loop is not None and self.loop.is_running():
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        return asyncio.run(coroutine)

    def check_wait(self) -> None:
        """Raise `TaskQueueError` if this is part of a blocking call in the thread of an event loop."""
        if self._blocked_thread == threading.get_ident():
            raise TaskQueueError(_WOULD_BLOCK)


class TestEnds(TaskEnds):
    """Waits for the ends of tasks, in any event loop. A wait for a task that has ended returns at once."""

    def __init__(self, control: Control, calls: TestCalls, is_draining: Callable[[], bool]) -> None:
        """Create it for a connection whose blocking calls are made by ``calls``.

        ``is_draining`` says whether a drain is running, which alone can end a task.
        """
        super().__init__(control)
        self._calls = calls
        self._is_draining = is_draining

    async def wait(
        self, key: str, task_id: str, *, wait_for_redrive: bool = False
    ) -> TaskStatus | None:
        """Return the status of a task once it has ended; ``None`` if the task is unknown.

        Raises `NotDrained` if no drain is running: at once if no other code could start one, or else after some
        looks. Each blocking call may have its own event loop, so waits share nothing.
        """
        looks = 0
        while True:
            (status,) = await self._control.statuses(key, task_id)
            if status is None or has_ended(status, wait_for_redrive=wait_for_redrive):
                return status
            self._calls.check_wait()
            looks = 0 if self._is_draining() else looks + 1
            if looks > (_LOOKS if _other_code_runs() else 0):
                raise NotDrained(_cannot_end(status))
            await asyncio.sleep(_PAUSE)


def _other_code_runs() -> bool:
    return len(asyncio.all_tasks()) > 1 or threading.active_count() > 1


def _cannot_end(status: TaskStatus) -> str:
    """Return why a task does not end, and what to do. ``status`` is that of a task that waits, or is dead."""
    text = f"task {status.task_id} of {status.key} is {status.state}, and no drain is running: "
    match status.state:
        case State.SCHEDULED:
            text += "call 'await taskqueue.advance(seconds)' before its result is awaited"
            return text + (f"; its last attempt failed: {status.error}" if status.error else "")
        case State.DEAD:
            return text + f"redrive the dead letter, and drain ({status.error})"
    return text + "call 'await taskqueue.drain()' before its result is awaited"


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that does not wait for anything, and return its result. Raises `TaskQueueError` if it does."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise TaskQueueError(_WOULD_BLOCK)
