"""Calls that run concurrently."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_core.concurrency import gather_all


async def test_a_single_call() -> None:
    """U19: it runs in the task of its caller, so the queue of events sends the next ones before it serves readers."""

    async def current() -> asyncio.Task[Any] | None:
        return asyncio.current_task()

    assert await gather_all(current() for _ in range(1)) == [asyncio.current_task()]
    first, second = await gather_all(current() for _ in range(2))
    assert first is not second
