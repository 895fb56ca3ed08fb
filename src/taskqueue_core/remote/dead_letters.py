"""Dead letters, over HTTP."""

from __future__ import annotations

import msgspec

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import WireDelivery, WireTask, to_delivery
from taskqueue_core.remote.address import path
from taskqueue_core.remote.client import HttpClient
from taskqueue_core.remote.control import batches
from taskqueue_core.tasks import DeadLetter, Failure

__all__ = ["RemoteDeadLetters"]


class _WireDeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    task: WireTask
    attempt: int
    losses: int
    reason: str
    failed_at: float
    history: tuple[Failure, ...] = ()


class _Page(msgspec.Struct, frozen=True):
    dead_letters: list[_WireDeadLetter]


class _Count(msgspec.Struct, frozen=True):
    count: int


class RemoteDeadLetters:
    """See `taskqueue_core.capabilities.DeadLetters`."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        """Return dead letters of a queue, oldest first, page by page."""
        found: dict[str, DeadLetter] = {}
        where = path("queues", key, "dead-letters")
        while len(found) < limit:
            wanted = min(limit - len(found), LIMITS.batch)
            query: dict[str, str | int] = {"limit": wanted}
            if after is not None:
                query["after"] = after
            page = (await self._client.ask("GET", where, _Page, query=query)).dead_letters
            new = {
                wire.task.id: _to_dead_letter(wire) for wire in page if wire.task.id not in found
            }
            found |= new
            if len(page) < wanted or not new:
                break
            after = page[-1].task.id
        return tuple(found.values())

    async def redrive(self, key: str, *task_ids: str) -> int:
        """Make dead tasks waiting again."""
        return await self._act(key, "redrive", task_ids)

    async def discard(self, key: str, *task_ids: str) -> int:
        """Give dead tasks up for good."""
        return await self._act(key, "discard", task_ids)

    async def _act(self, key: str, verb: str, task_ids: tuple[str, ...]) -> int:
        where = path("queues", key, "dead-letters", verb)
        if not task_ids:
            return (await self._client.ask("POST", where, _Count, body={"all": True})).count
        count = 0
        for ids in batches(task_ids):
            count += (await self._client.ask("POST", where, _Count, body={"ids": ids})).count
        return count


def _to_dead_letter(wire: _WireDeadLetter) -> DeadLetter:
    # The one reader of a task from the wire is the frames' own, which reads whole deliveries.
    carrier = WireDelivery(receipt="-", attempt=wire.attempt, delivered_at=0.0, task=wire.task)
    return DeadLetter(
        task=to_delivery(carrier).task,
        attempt=wire.attempt,
        losses=wire.losses,
        reason=wire.reason,
        failed_at=wire.failed_at,
        history=wire.history,
    )
