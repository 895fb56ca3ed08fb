"""Running coroutines concurrently, so that none of them is still running when the call returns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, NoReturn, Protocol, TypeVar, cast

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


async def wait_forever() -> NoReturn:
    """Wait until cancelled."""
    while True:
        await asyncio.get_running_loop().create_future()


Answer = TypeVar("Answer")


async def gather_all(calls: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all calls. Return their results in the order of ``calls``, or raise the first error in this order."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
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
