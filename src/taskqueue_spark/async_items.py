"""Reading asynchronous generators from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import TypeVar

Item = TypeVar("Item")


def items_of(runner: asyncio.Runner, items: AsyncGenerator[Item]) -> Generator[Item]:
    """Yield the items of an asynchronous generator that runs in ``runner``, and close the generator at the end."""

    async def following() -> Item | None:
        return await anext(items, None)

    try:
        while (item := runner.run(following())) is not None:
            yield item
    finally:
        runner.run(items.aclose())
