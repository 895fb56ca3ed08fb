"""Calls to several places at once, none of which is held up, or left out, because another one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

__all__ = ["together"]

Answer = TypeVar("Answer")


async def together(calls: Iterable[Awaitable[Answer]]) -> list[Answer]:
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
