"""The dead letters of a server's backend, used over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec

from taskqueue_core.dead_letter_filter import DeadLetterFilter
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import WireTask, to_task
from taskqueue_core.server_address import path
from taskqueue_core.tasks import DeadLetter, Failure
from taskqueue_remote.client import HttpClient
from taskqueue_remote.control import Count, batches
from taskqueue_remote.problems import problem_of

_NOT_FOUND = 404
_NOT_DEAD = "no_dead_letter"


class _WireDeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    task: WireTask
    attempt: int
    losses: int
    reason: str
    failed_at: float
    history: tuple[Failure, ...] = ()


class _Page(msgspec.Struct, frozen=True):
    dead_letters: list[_WireDeadLetter]
    next: str | None = None


class RemoteDeadLetters:
    """The dead letters of the server's backend. Each call sends HTTP requests."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        collected: dict[str, DeadLetter] = {}
        target = path("queues", key, "dead-letters")
        while len(collected) < limit:
            count = min(limit - len(collected), LIMITS.batch)
            query: dict[str, str | int] = {"limit": count}
            if after is not None:
                query["after"] = after
            page = await self._client.ask("GET", target, _Page, query=query)
            dead_letters = page.dead_letters
            new = {
                wire.task.id: _to_dead_letter(wire)
                for wire in dead_letters
                if wire.task.id not in collected
            }
            collected |= new
            if page.next is None or (dead_letters and not new):
                break
            after = page.next
        return tuple(collected.values())

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        target = path("queues", key, "dead-letters", task_id)
        answer = await self._client.fetch("GET", target)
        if answer.status == _NOT_FOUND and problem_of(answer.status, answer.body).code == _NOT_DEAD:
            return None
        if not answer.ok:
            raise self._client.error(answer)
        return _to_dead_letter(self._client.decode(answer.body, _WireDeadLetter))

    async def redrive(self, key: str, *task_ids: str) -> int:
        return await self._act(key, "redrive", task_ids)

    async def discard(self, key: str, *task_ids: str) -> int:
        return await self._act(key, "discard", task_ids)

    async def act_on_filter(self, verb: str, key: str, now: float, **conditions: Any) -> int:
        """Redrive or discard the dead letters that match the conditions of `DeadLetterFilter`; return their number.

        ``verb`` is ``redrive`` or ``discard``. ``older_than`` counts back from ``now``.
        """
        DeadLetterFilter.of(now, **conditions)
        if conditions.get("older_than") is not None:  # so that every request uses the same time
            conditions["failed_before"] = max(0.0, now - conditions.pop("older_than"))
        fields = {name: value for name, value in conditions.items() if value is not None}
        target = path("queues", key, "dead-letters", verb)
        body: dict[str, Any] = {"filter": fields}
        query = {"confirm": key} if verb == "discard" else None
        count = 0
        while True:
            answer = await self._client.ask("POST", target, Count, body=body, query=query)
            count += answer.count
            if answer.next is None:
                return count
            body["after"] = answer.next

    async def _act(self, key: str, verb: str, task_ids: tuple[str, ...]) -> int:
        target = path("queues", key, "dead-letters", verb)
        if not task_ids:
            body, query = {"all": True}, {"confirm": key} if verb == "discard" else None
            return (await self._client.ask("POST", target, Count, body=body, query=query)).count
        count = 0
        for ids in batches(task_ids):
            count += (await self._client.ask("POST", target, Count, body={"ids": ids})).count
        return count


def _to_dead_letter(wire: _WireDeadLetter) -> DeadLetter:
    return DeadLetter(**msgspec.structs.asdict(wire) | {"task": to_task(wire.task)})
