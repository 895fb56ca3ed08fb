"""The capabilities ``dead_letters`` and ``control`` of a backend on a `RecordStore`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from itertools import chain, islice

import msgspec

from taskqueue_core.authoring.helpers import (
    checked_progress,
    checked_settings,
    demand_unused,
    encodable,
    workers_of,
)
from taskqueue_core.authoring.listings import ENDED
from taskqueue_core.capabilities import (
    DeletedQueue,
    Durability,
    EventKind,
    Maintained,
    QueueSettings,
)
from taskqueue_core.limits import check_name, check_time
from taskqueue_core.recordstore.store import Record
from taskqueue_core.recordstore.transitions import STEP, Transitions
from taskqueue_core.tasks import (
    DeadLetter,
    Delivery,
    Expired,
    Ledger,
    QueueStats,
    State,
    TaskStatus,
    WorkerInfo,
)

_PASS = 8
"""maximum number of steps in one maintenance pass"""


class RecordDeadLetters:
    """The dead letters of a `RecordBackend`. Changes to all dead letters of a queue are divided into several steps."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        with self._transitions.step():
            last = self._transitions.store.load(key, after) if after is not None else None
            index = last.seq if last is not None and last.state is State.DEAD else 0
            records = self._transitions.store.in_state(key, State.DEAD, limit, index)
        return tuple(record.dead_letter for record in records)

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        with self._transitions.step():
            record = self._transitions.store.load(key, task_id)
        return None if record is None or record.state is not State.DEAD else record.dead_letter

    async def redrive(self, key: str, *task_ids: str) -> int:
        return await self._each(key, task_ids, self._redrive)

    async def discard(self, key: str, *task_ids: str) -> int:
        return await self._each(key, task_ids, self._discard)

    async def _each(
        self, key: str, task_ids: tuple[str, ...], change: Callable[[Record, float], None]
    ) -> int:
        if not task_ids:
            return await self._transitions.sweep(key, [State.DEAD], change)
        store = self._transitions.store

        def change_chosen(now: float) -> int:
            records = [store.load(key, task_id) for task_id in dict.fromkeys(task_ids)]
            dead = [record for record in records if record and record.state is State.DEAD]
            for record in dead:
                change(record, now)
            return len(dead)

        return await self._transitions.when_promoted([key], change_chosen)

    def _redrive(self, record: Record, now: float) -> None:
        record.redrive()
        self._transitions.move(record, State.WAITING, now)

    def _discard(self, record: Record, now: float) -> None:
        self._transitions.move(record, State.DISCARDED, now)


class RecordControl:
    """Implementation of `Control` for a `RecordBackend` whose store supports ``durabilities``."""

    def __init__(self, transitions: Transitions, durabilities: Collection[Durability]) -> None:
        self._transitions = transitions
        self._stored = durabilities

    async def queues(self) -> tuple[str, ...]:
        with self._transitions.step():
            return tuple(
                sorted(self._transitions.store.queues() | self._transitions.subscriptions.keys)
            )

    async def settings(self, key: str) -> QueueSettings:
        with self._transitions.step():
            return self._transitions.store.settings(key)

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        check_name("key", key)
        checked_settings(settings, self._stored, flow=True, listing=True)
        with self._transitions.step() as now:
            return self._transitions.configure(key, settings, now)

    async def ledger(self, key: str) -> Ledger:
        with self._transitions.step():
            return _ledger(self._transitions.store.counters(key))

    async def stats(self, key: str) -> QueueStats:
        with self._transitions.step():
            counters = self._transitions.store.counters(key)
            waiting = self._transitions.store.in_state(key, State.WAITING, 1)
        return QueueStats(
            key=key,
            ledger=_ledger(counters),
            oldest_waiting=waiting[0].available_at if waiting else None,
            delivered=counters["delivered"],
            redelivered=counters["redelivered"],
            retried=counters["retried"],
            lost=counters["lost"],
            subscribers=len(self._transitions.subscriptions.of(key)),
            blocked_on_dead=counters["blocked_on_dead"],
        )

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        with self._transitions.step() as now:
            records = [self._transitions.find(key, task_id, now) for task_id in task_ids]
        return tuple(
            record.status if record and record.replaced is None else None for record in records
        )

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        with self._transitions.step() as now:
            records = [self._transitions.find(key, task_id, now) for task_id in task_ids]
        return tuple(
            record.result if record and now < record.result_until else None for record in records
        )

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        checked = checked_progress(value)
        with self._transitions.step() as now:
            record = self._transitions.find(delivery.task.key, delivery.task.id, now)
            if record is None or record.receipt != delivery.receipt:
                return False
            reported = encodable(checked) if isinstance(checked, str) else checked
            record.progress = reported
            record.updated_at = now
            store = self._transitions.store
            record.patience = store.settings(record.task.key).max_processing_time
            store.save(record)
            if record.stream:
                self._transitions.streams.note(record, EventKind.PROGRESS, reported, now)
        return True

    async def cancel(self, key: str, task_id: str) -> bool:
        with self._transitions.step() as now:
            record = self._transitions.find(key, task_id, now)
            if record is None or not record.live:
                return False
            self._cancel(record, now)
        return True

    async def reschedule(self, key: str, task_id: str, at: float) -> bool:
        check_time("at", at)
        with self._transitions.step() as now:
            record = self._transitions.find(key, task_id, now)
            if record is None or not record.movable or self._transitions.swept(record, now):
                return False
            self._transitions.schedule(record, at, now)
        return True

    async def purge(self, key: str) -> int:
        """End all tasks that wait, are scheduled or blocked as ``cancelled``, in several steps; return their number."""
        states = State.WAITING, State.SCHEDULED, State.BLOCKED
        return await self._transitions.sweep(key, states, self._cancel)

    async def delete(self, key: str) -> DeletedQueue:
        """Delete a queue that is not in use; its records are deleted in several steps. Raises `QueueInUse`."""
        store, forgotten = self._transitions.store, 0
        while True:
            with self._transitions.step():
                counters = store.counters(key)
                demand_unused(
                    key,
                    waiting=counters["waiting"],
                    scheduled=counters["scheduled"],
                    running=counters["in_flight"],
                    dead=counters["dead"],
                    consumers=len(self._transitions.subscriptions.of(key)),
                    blocked=counters["blocked"],
                )
                ended = (store.in_state(key, state, STEP) for state in ENDED)
                records = list(islice(chain.from_iterable(ended), STEP))
                for record in records:
                    self._transitions.drop(record)
                forgotten += len(records)
                if not records:
                    deleted = key in store.queues()
                    self._transitions.remove(key)
                    return DeletedQueue(deleted=deleted, forgotten=forgotten)
            await asyncio.sleep(0)

    def _cancel(self, record: Record, now: float) -> None:
        self._transitions.move(record, State.CANCELLED, now)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        with self._transitions.step():
            return workers_of(self._transitions.subscriptions.all)

    async def maintain(self) -> Maintained:
        promoted = forgotten = recovered = 0
        expired: list[Expired] = []
        behind, start = None, time.perf_counter()
        for _ in range(_PASS):
            with self._transitions.step() as now:
                alarms = self._transitions.store.alarms(now, STEP)
                self._transitions.links.asked = 0
                for found, state in [(record, record.state) for record in alarms]:
                    record = self._transitions.present(found)
                    if record is None or record.state is not state:
                        continue  # another task has ended in this step, and has released it or let it end
                    if record.is_stream_over(now):
                        self._transitions.streams.leave(record)
                        self._transitions.store.save(record)
                    elif record.ended:
                        self._transitions.drop(record)
                        forgotten += 1
                    elif record.overdue(now):
                        self._transitions.move(record, State.EXPIRED, now)
                        expired.append(record.expired)
                    elif record.state is State.BLOCKED:
                        self._transitions.links.ask_again(record, now)
                    elif self._transitions.promote_one(record, now):
                        recovered += 1
                    else:
                        promoted += record.state is State.WAITING
                self._transitions.links.batches.forget(now)
                left = self._transitions.store.alarms(now, 1)
                deleting = self._transitions.streams.delete()
            behind = now - (left[0].alarm or now) if left else 0.0 if deleting else None
            if behind is None:
                break
            await asyncio.sleep(0)
        forgotten += await self._trim()
        took = time.perf_counter() - start
        return Maintained(
            promoted=promoted,
            expired=tuple(expired),
            forgotten=forgotten,
            recovered=recovered,
            unclaimed=self._unclaimed(),
            behind=behind,
            again_in=None if behind is None else 3 * took,
        )

    async def _trim(self) -> int:
        """Delete ended tasks that are more than their queues keep, a queue in each step; return their number."""
        key, deleted, again = "", 0, _PASS
        while True:
            await asyncio.sleep(0)
            with self._transitions.step() as now:
                found, number = self._transitions.kept.trim(key, now)
            if not found:
                return deleted
            deleted += number
            if number >= STEP and again:  # the same queue may have more
                again -= 1
            else:
                key = found

    def _unclaimed(self) -> tuple[str, ...]:
        transitions, matches = self._transitions, list[str]()
        with transitions.step():
            for key in sorted(transitions.hints.waiting - transitions.subscriptions.keys):
                if transitions.first_waiting(key) is None:
                    transitions.hints.waiting.discard(key)
                else:
                    matches.append(key)
        return tuple(matches)


def _ledger(counters: Counter[str]) -> Ledger:
    return msgspec.convert(dict(counters), Ledger)
