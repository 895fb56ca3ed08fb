"""Calls of scripts that concern one queue: once, for each of its tasks, or repeatedly for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskqueue_redis.context import RedisContext
from taskqueue_redis.scripts.runner import Arg

AT_ONCE = 250
"""maximum number of tasks that one script call moves, so that it blocks Redis only briefly"""


class ScriptCaller:
    """The base of the parts of a backend that call scripts."""

    def __init__(self, context: RedisContext) -> None:
        self._context = context

    async def _of(self, script: str, key: str, *args: Arg) -> Any:
        return await self._run(script, self._context.scripts.partitions.of(key), key, *args)

    async def _of_each(self, script: str, key: str, task_ids: Sequence[str]) -> list[Any]:
        """Run a script for tasks of a queue, in several calls if necessary; return an answer per task."""
        self._context.ensure_open()
        partition = self._context.scripts.partitions.of(key)
        items = [(task_id,) for task_id in task_ids]
        return await self._context.scripts.run_each(script, partition, (key,), items)

    async def _of_all(self, script: str, key: str, *args: Arg) -> int:
        """Run a script repeatedly, for a chunk of a queue's tasks each time; return how many tasks it has changed."""
        total, position, over = 0, b"", False
        while not over:
            number, over, position, *_ = await self._of(script, key, *args, position, AT_ONCE)
            total += number
        return total

    async def _pages(self, script: str, partition: str, *args: Arg) -> list[Any]:
        self._context.ensure_open()
        return await self._context.scripts.run_pages(script, partition, *args)

    async def _run(self, script: str, partition: str, *args: Arg) -> Any:
        self._context.ensure_open()
        return await self._context.scripts.run(script, partition, *args)
