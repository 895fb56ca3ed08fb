"""Lists of tasks in the memory backend.

A page looks at all records of the queue, in steps between which other coroutines run. It reads at most `LOOKED_AT` of
those that are in the state, in their order.
"""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from typing import NamedTuple

from typing_extensions import Unpack

from taskqueue_core.authoring.entries import detail_of, summary_of
from taskqueue_core.authoring.listings import Filters, Query, checked_page
from taskqueue_core.capabilities import TaskDetail, TaskPage
from taskqueue_core.capabilities.listing import LOOKED_AT
from taskqueue_core.tasks import State
from taskqueue_memory.records import QueueState, TaskRecord
from taskqueue_memory.transitions import MemoryStore

_AT_ONCE = 10_000
"""number of records that are looked at before other coroutines run"""
_LANES = (State.WAITING, State.IN_FLIGHT)


class _Listed(NamedTuple):
    place: tuple[float, ...]
    record: TaskRecord


class MemoryListing:
    """The lists of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def tasks(
        self, key: str, *, after: str | None = None, limit: int = 100, **filters: Unpack[Filters]
    ) -> TaskPage:
        query = Query(key=key, **filters)
        most = checked_page(limit)
        queue = self._store.known(key)
        query.check(queue.settings)
        start = query.position(after, tuple[float, ...])
        listed = await _candidates(queue, query, start)
        shown: list[_Listed] = []
        looked_at = 0
        for candidate in listed[:LOOKED_AT]:
            looked_at += 1
            if _matches(candidate.record, query):
                shown.append(candidate)
                if len(shown) == most:
                    break
        more = looked_at < len(listed)
        return TaskPage(
            tasks=tuple([summary_of(record) for _, record in shown]),
            next=query.cursor(listed[looked_at - 1].place) if more else None,
            looked_at=looked_at,
        )

    async def task(self, key: str, task_id: str) -> TaskDetail | None:
        record = self._store.find(key, task_id)
        return None if record is None or record.replaced is not None else detail_of(record)


async def _candidates(
    queue: QueueState, query: Query, start: tuple[float, ...] | None
) -> list[_Listed]:
    """Return the records of the state or the tag that come next, whatever the other filters say."""
    numbered = (
        [(record, 0) for record in queue.records.values()]
        if query.tag is None
        else list(queue.tags.of(query.tag))
    )
    sign, found = (-1 if query.newest else 1), list[_Listed]()
    for number, (record, published) in enumerate(numbered, 1):
        if record.replaced is None and (query.tag is not None or record.state is query.state):
            place = (published,) if query.tag is not None else _place(record)
            ordered = tuple([sign * part for part in place])
            if start is None or ordered > start:
                found.append(_Listed(ordered, record))
        if not number % _AT_ONCE:
            await asyncio.sleep(0)
    return nsmallest(LOOKED_AT + 1, found, key=lambda listed: listed.place)


def _place(record: TaskRecord) -> tuple[float, ...]:
    """Return the place of a record in the list of its state."""
    if record.state is State.SCHEDULED:
        return (record.at, record.seq)
    if record.state in _LANES:
        returned = record.state is State.WAITING and record.returned
        return (record.held, -record.task.priority, not returned, record.seq)
    return (record.seq,)


def _matches(record: TaskRecord, query: Query) -> bool:
    return (
        query.state in (None, record.state)
        and query.tenant in (None, record.task.tenant)
        and query.worker in (None, record.worker)
    )
