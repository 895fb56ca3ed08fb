"""A task that streams numbers, for chaos runs: ``taskqueue worker tests.chaos.programs.streams:tasks``."""

from __future__ import annotations

import asyncio

from taskqueue_core import Context, Tasks

tasks = Tasks()


@tasks.task
async def tell(context: Context, number: int, pause: float) -> int:
    """Stream the numbers from 0, with a pause in seconds after each."""
    for n in range(number):
        context.stream(n)
        await asyncio.sleep(pause)
    return number
