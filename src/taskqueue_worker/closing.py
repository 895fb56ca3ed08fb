"""Closing what a worker has opened for its handlers: lifespans and shared dependencies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from typing import Any

CLOSE_SECONDS = 5.0
"""seconds that each lifespan and shared dependency has to close, after a stop without grace"""
CLEANUP_SECONDS = 1.0
"""seconds that cancelled code has for cleaning up, before it is given up"""
_log = logging.getLogger("taskqueue.worker")


class Closing:
    """Waits for what closes, and ends it after a stop without grace. Belongs to one event loop."""

    def __init__(self) -> None:
        """Create an object that waits without a limit."""
        self.unfinished: str | None = None
        """what is opening or closing at present, for messages"""
        self._now = False
        self._hurry: asyncio.Future[None] | None = None

    def hurry(self) -> None:
        """Cancel what closes at present. What closes later has `CLOSE_SECONDS`."""
        self._now = True
        if self._hurry is not None and not self._hurry.done():
            self._hurry.set_result(None)

    async def wait(self, name: str, task: asyncio.Task[None]) -> None:
        """Wait until a task has closed what has this name, and raise what it raises.

        If it is cancelled because of `hurry`, or does not end after that, this is an error in the log. A cancellation
        of this call cancels the task, too.
        """
        self.unfinished = name
        self._hurry = asyncio.get_running_loop().create_future()
        limit = CLOSE_SECONDS if self._now else None
        try:
            await asyncio.wait(
                [task, self._hurry], timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self._hurry = None
            if cancelled := not task.done():
                task.cancel()
                try:
                    await asyncio.wait([task], timeout=CLEANUP_SECONDS)
                finally:
                    if not task.done():
                        _give_up(name, task)
            self.unfinished = None
        if not task.done():
            return
        if cancelled and task.cancelled():
            _log.error("%s was cancelled while it closed, because the worker stops now", name)
        elif not task.cancelled():
            task.result()


def _give_up(name: str, task: asyncio.Task[None]) -> None:
    _log.error("%s ignores its cancellation, and was left unclosed", name)
    # Otherwise, the end of `asyncio.run` would wait for the task, for ever.
    asyncio.tasks._unregister_task(task)  # noqa: SLF001 - documented for other kinds of tasks


class OpenedLifespan:
    """A lifespan that is opened and closed by the same asyncio task, so that it may have a task group."""

    def __init__(
        self,
        open_lifespan: Callable[[], AbstractAsyncContextManager[Any]],
        closing: Closing,
        context: Context,
    ) -> None:
        """Start to open a lifespan in ``context``. The calling task is cancelled if the lifespan's task is."""
        self._name = name_of(open_lifespan)
        self._closing = closing
        self._owner = asyncio.current_task()
        self._asked = False
        self._error: BaseException | None = None
        self._end = asyncio.Event()
        self._state: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(open_lifespan), context=context)

    async def state(self) -> Any:
        """Wait until the lifespan is open, and return what it yielded, or raise what it raised.

        A cancellation cancels the opening.
        """
        self._closing.unfinished = self._name
        try:
            await asyncio.wait([self._task, self._state], return_when=asyncio.FIRST_COMPLETED)
            self._closing.unfinished = None
        except asyncio.CancelledError:
            self._task.cancel()
            await self.close(None)
            raise
        return self._task.result() if self._task.done() else self._state.result()

    async def close(self, error: BaseException | None) -> None:
        """Close the lifespan, whose ``yield`` raises ``error``. Raises what the lifespan raises."""
        self._error = error
        self._end.set()
        try:
            await self._closing.wait(self._name, self._task)
        finally:
            if self._asked and self._owner is not None:
                self._owner.uncancel()

    async def _live(self, open_lifespan: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        cancelled: BaseException | None = None
        async with open_lifespan() as state:
            self._state.set_result(state)
            while not self._end.is_set():
                try:
                    await self._end.wait()
                except asyncio.CancelledError as error:
                    # By a task group of the lifespan, or by the end of `asyncio.run`. Handlers end first.
                    cancelled = error
                    self._cancel_owner()
            if failure := self._error or cancelled:
                raise failure

    def _cancel_owner(self) -> None:
        # A second cancellation would cut short the release of the running tasks.
        if not self._asked and self._owner is not None and not self._owner.cancelling():
            self._asked = True
            self._owner.cancel()


def name_of(open_lifespan: Callable[[], object]) -> str:
    """Return the name of a lifespan, for messages."""
    module, name = open_lifespan.__module__, getattr(open_lifespan, "__qualname__", "")
    return f"the lifespan {module}.{name}"
