"""The operations of the Redis backend for dead letters."""

from __future__ import annotations

from taskqueue_core.tasks import DeadLetter
from taskqueue_redis.script_calls import AT_ONCE, ScriptCaller
from taskqueue_redis.scripts.runner import Arg
from taskqueue_redis.scripts.task_record import dead_letter_of

_PAGE = 500
"""maximum number of dead letters that one script call reads"""


class RedisDeadLetters(ScriptCaller):
    """Dead-letter operations of the Redis backend."""

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        found: dict[bytes, DeadLetter] = {}
        last: Arg = after or ""
        more = True
        while more and len(found) < limit:
            number = min(_PAGE, limit - len(found))
            page, large = await self._of("dead_letters", key, last, number)
            found |= {answer[0]: dead_letter_of(key, answer) for answer in page}
            last, more = page[-1][0] if page else last, large or len(page) == number
        return tuple(found.values())

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        reply, _ = await self._of("dead_letters", key, task_id, 0)
        return dead_letter_of(key, reply[0]) if reply else None

    async def redrive(self, key: str, *task_ids: str) -> int:
        return await self._move("redrive", key, task_ids)

    async def discard(self, key: str, *task_ids: str) -> int:
        return await self._move("discard", key, task_ids)

    async def _move(self, verb: str, key: str, task_ids: tuple[str, ...]) -> int:
        if task_ids:
            total = 0
            while task_ids:
                some = task_ids[:AT_ONCE]
                moved, _, _, done = await self._of("redrive", key, verb, "", AT_ONCE, *some)
                total, task_ids = total + moved, task_ids[done:]
            return total
        return await self._of_all("redrive", key, verb)
