"""Tasks that were given up."""

from __future__ import annotations

from typing import Any

from taskqueue_core.tasks import DeadLetter
from taskqueue_redis.connection.errors import translated
from taskqueue_redis.context import Home
from taskqueue_redis.scripts.runner import Word
from taskqueue_redis.scripts.task_record import dead_letter_of

__all__ = ["RedisDeadLetters"]

_MOVE_CHUNK = 500


class RedisDeadLetters:
    """See `taskqueue_core.capabilities.DeadLetters`."""

    def __init__(self, home: Home) -> None:
        self._home = home

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        told = await self._of("dead_letters", key, after or "", limit)
        return tuple(dead_letter_of(key, answer) for answer in told)

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        told = await self._of("dead_letters", key, task_id, 0)
        return dead_letter_of(key, told[0]) if told else None

    async def redrive(self, key: str, *task_ids: str) -> int:
        return await self._move("redrive", key, task_ids)

    async def discard(self, key: str, *task_ids: str) -> int:
        return await self._move("discard", key, task_ids)

    async def _move(self, verb: str, key: str, task_ids: tuple[str, ...]) -> int:
        moved, upto, over = 0, b"", False
        chunks = [task_ids[n : n + _MOVE_CHUNK] for n in range(0, len(task_ids), _MOVE_CHUNK)]
        if chunks:
            for chunk in chunks:
                moved += (await self._of("redrive", key, verb, "", _MOVE_CHUNK, *chunk))[0]
            return moved
        while not over:
            number, over, upto = await self._of("redrive", key, verb, upto, _MOVE_CHUNK)
            moved += number
        return moved

    async def _of(self, script: str, key: str, *words: Word) -> Any:
        self._home.demand_open()
        with translated():
            return await self._home.scripts.run(
                script, self._home.scripts.partitions.of(key), key, *words
            )
