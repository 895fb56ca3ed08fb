"""Running coroutines concurrently, so that none of them is still running when the call returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NoReturn, Protocol, Self, TypeVar, cast

T = TypeVar("T")


async def first_completed(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Return the result, or raise the exception, of the coroutine that ends first, and cancel the others.

    If several coroutines end at the same time, the one that comes first in the arguments counts.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # An exception refers to this frame. If the frame referred to it too, only the garbage collector would free it.
        del task, tasks


class Interruptible:
    """Makes calls that end early once one of several events is set. It waits for the events for all of the calls.

    >>> async def read(stop: asyncio.Event) -> bytes | None:
    ...     async with Interruptible(stop) as calls:
    ...         return await calls.make(asyncio.sleep(1, b"page"))
    """

    def __init__(self, *events: asyncio.Event) -> None:
        """Create it. Enter it with ``async with`` before the first call."""
        self._events = events
        self._tasks: list[asyncio.Task[Any]] = []
        self._scope: asyncio.Timeout | None = None
        self._interrupted = False

    async def make(self, call: Awaitable[T]) -> T | None:
        """Return the result of a call; cancel it and return ``None`` once one of the events is set. One at a time."""
        found: T | None = None
        scope = self._scope = asyncio.timeout(0 if self._interrupted else None)
        try:
            async with scope:
                found = await call
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._scope = None
        return None if self._interrupted else found

    def _interrupt(self, _: object) -> None:
        if not self._interrupted:
            self._interrupted = True
            if self._scope is not None:
                self._scope.reschedule(0)

    async def __aenter__(self) -> Self:
        """Begin to wait for the events."""
        self._interrupted = any(event.is_set() for event in self._events)
        self._tasks = [asyncio.create_task(event.wait()) for event in self._events]
        for task in self._tasks:
            task.add_done_callback(self._interrupt)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def wait_forever() -> NoReturn:
    """Wait until cancelled."""
    while True:
        await asyncio.get_running_loop().create_future()


Answer = TypeVar("Answer")


async def gather_all(calls: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all calls. Return their results in the order of ``calls``, or raise the first error in this order.

    A single call runs in the task of the caller, which then continues before what became ready later.
    """
    waiting = tuple(calls)
    if len(waiting) == 1:
        return [await waiting[0]]
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    error = next((outcome for outcome in outcomes if isinstance(outcome, BaseException)), None)
    if error is None:
        return cast("list[Answer]", outcomes)
    try:
        raise error
    finally:
        del error, outcomes  # as in `first_completed`


async def try_for(seconds: float, work: Callable[[], Awaitable[object]]) -> None:
    """Call ``work`` and await it, but give up after a number of seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work()


class BlockingCalls(Protocol):
    """A way to make blocking calls."""

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result."""
