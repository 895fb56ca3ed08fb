"""Running several coroutines as one, so that none is ever left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def first_completed(*coroutines: Coroutine[Any, Any, T]) -> T:
    """Return or raise what the first to end ends with; cancel and await the others.

    Where several end in one turn the one named first counts.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def wait_forever() -> NoReturn:
    """Wait until cancelled."""
    while True:
        await asyncio.get_running_loop().create_future()


Answer = TypeVar("Answer")


async def gather_all(calls: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Return what each call answers, in their order. Raises, once all have ended, what the first to fail has raised."""
    answers: list[Answer] = []
    failure: BaseException | None = None
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            failure = failure or outcome
        else:
            answers.append(outcome)
    if failure is not None:
        raise failure
    return answers
