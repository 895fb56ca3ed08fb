"""Operator functions of the memory backend: control and dead letters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import islice

from taskqueue_core.authoring.helpers import (
    checked_progress,
    checked_settings,
    demand_unused,
    workers_of,
)
from taskqueue_core.capabilities import DeletedQueue, Durability, Maintained, QueueSettings
from taskqueue_core.limits import check_name, check_time
from taskqueue_core.tasks import (
    DeadLetter,
    Delivery,
    Ledger,
    QueueStats,
    State,
    TaskStatus,
    WorkerInfo,
)
from taskqueue_memory.records import TaskRecord
from taskqueue_memory.transitions import MemoryStore

_WITHOUT_PARENTS = (State.WAITING, State.SCHEDULED)
_AT_ONCE = 500
"""number of records that a call processes before it lets other asyncio tasks run"""


class MemoryControl:
    """Control operations of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def queues(self) -> tuple[str, ...]:
        return tuple(sorted(self._store.queues))

    async def settings(self, key: str) -> QueueSettings:
        return self._store.known(key).settings

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        check_name("key", key)
        journal = self._store.journal is not None
        durabilities = {Durability.MEMORY}
        checked_settings(
            settings,
            durabilities,
            journal=journal,
            flow=True,
            fair_order=True,
            floor_share=True,
            fan_out=True,
            listing=True,
        )
        return self._store.configure(key, settings)

    async def ledger(self, key: str) -> Ledger:
        queue = self._store.queues.get(key)
        return Ledger() if queue is None else queue.ledger

    async def stats(self, key: str) -> QueueStats:
        return self._store.known(key).stats

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        records = (self._store.find(key, task_id) for task_id in task_ids)
        return tuple(
            record.status if record and record.replaced is None else None for record in records
        )

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        now = self._store.clock.now()
        records = (self._store.find(key, task_id) for task_id in task_ids)
        return tuple(
            record.result if record is not None and now < record.result_until else None
            for record in records
        )

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        return self._store.progress(delivery.receipt, checked_progress(value))

    async def cancel(self, key: str, task_id: str) -> bool:
        record = self._store.find(key, task_id)
        return record is not None and self._store.cancel(record)

    async def reschedule(self, key: str, task_id: str, at: float) -> bool:
        check_time("at", at)
        record = self._store.find(key, task_id)
        return record is not None and self._store.reschedule(record, at)

    async def purge(self, key: str) -> int:
        records = list(self._store.known(key).records.values())
        idle = [r for r in records if r.state in _WITHOUT_PARENTS]
        # First cancel the records that wait for an ordering key. If the holder of the key were cancelled first, the key
        # would be passed on to one of them.
        # First of all cancel the blocked records: their parents then do not release them.
        idle.sort(key=lambda record: not record.held)
        blocked = [record for record in records if record.state is State.BLOCKED]
        done = 0
        async for record in _in_turn([*blocked, *idle]):
            if record.state is State.CANCELLED:  # its parent was cancelled before it
                done += 1
            elif record.state in (*_WITHOUT_PARENTS, State.BLOCKED):
                done += self._store.cancel(record)
        return done

    async def delete(self, key: str) -> DeletedQueue:
        queue = self._store.known(key)
        demand_unused(
            key,
            blocked=queue.states[State.BLOCKED],
            waiting=queue.states[State.WAITING],
            scheduled=queue.states[State.SCHEDULED],
            running=queue.states[State.IN_FLIGHT],
            dead=queue.states[State.DEAD],
            consumers=len(queue.subscribers),
        )
        deleted = key in self._store.queues
        if deleted:
            self._store.delete(queue)
        return DeletedQueue(deleted=deleted, forgotten=len(queue.records))

    async def workers(self) -> tuple[WorkerInfo, ...]:
        queues = self._store.queues.values()
        return workers_of(
            {subscriber: None for queue in queues for subscriber in queue.subscribers}
        )

    async def maintain(self) -> Maintained:
        start = time.perf_counter()
        promoted = self._store.catch_up()
        recovered, self._store.recovered = self._store.recovered, 0
        idle = self._store.forget_tenants()
        self._store.batches.forget(self._store.clock.now())
        expired, forgotten = tuple(self._store.expire()), self._store.forget() + self._store.trim()
        removed = self._store.remove_idle()
        timers, now = self._store.timers, self._store.clock.now()
        late = now - min(timers.deadlines.first, timers.ends.first, idle)
        unclaimed = sorted(
            queue.key
            for queue in self._store.queues.values()
            if queue.states[State.WAITING] and not queue.subscribers
        )
        return Maintained(
            promoted=promoted,
            expired=expired,
            forgotten=forgotten,
            recovered=recovered,
            removed=removed,
            unclaimed=tuple(unclaimed),
            behind=late if late >= 0 else None,
            again_in=3 * (time.perf_counter() - start) if late >= 0 else None,
        )


class MemoryDeadLetters:
    """Dead-letter operations of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        dead = self._store.known(key).dead
        rest = iter(dead.items())
        if after in dead:
            next(task_id for task_id, _ in rest if task_id == after)
        return tuple(record.dead_letter for _, record in islice(rest, limit))

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        record = self._store.known(key).dead.get(task_id)
        return record.dead_letter if record else None

    async def redrive(self, key: str, *task_ids: str) -> int:
        return await _each(self._dead(key, task_ids), self._store.redrive)

    async def discard(self, key: str, *task_ids: str) -> int:
        return await _each(self._dead(key, task_ids), self._store.discard)

    def _dead(self, key: str, task_ids: tuple[str, ...] = ()) -> Sequence[TaskRecord]:
        dead = self._store.known(key).dead
        if not task_ids:
            return tuple(dead.values())
        return [dead[task_id] for task_id in dict.fromkeys(task_ids) if task_id in dead]


async def _each(dead: Sequence[TaskRecord], end: Callable[[TaskRecord], None]) -> int:
    done = 0
    async for record in _in_turn(dead):
        if record.state is State.DEAD:
            end(record)
            done += 1
    return done


async def _in_turn(records: Sequence[TaskRecord]) -> AsyncIterator[TaskRecord]:
    """Yield the records. After every `_AT_ONCE` records, other asyncio tasks run, and may change the rest."""
    for number, record in enumerate(records, 1):
        yield record
        if not number % _AT_ONCE:
            await asyncio.sleep(0)
