"""The capability ``listing`` of a backend on a `RecordStore`.

A page reads records in the order of the list, in steps between which other coroutines run.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated, NamedTuple

from msgspec import Meta
from typing_extensions import Unpack

from taskqueue_core.authoring.listings import Filters, Query, checked_page, detail_of, summary_of
from taskqueue_core.capabilities import Erasure, TaskDetail, TaskPage, TaskSummary
from taskqueue_core.capabilities.listing import LOOKED_AT
from taskqueue_core.recordstore.store import AFTER_ALL, Record, place_at
from taskqueue_core.recordstore.tags import links_of
from taskqueue_core.recordstore.transitions import Transitions
from taskqueue_core.tasks import State

_AT_ONCE = 100
"""maximum number of records that one step reads, because they may be large"""


class _Position(NamedTuple):
    """What a cursor contains: the place of the last record that was read."""

    place: Annotated[str, Meta(max_length=300, pattern=r"^[ -~]*\Z")]


class RecordListing:
    """The lists of a `RecordBackend`."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def tasks(
        self, key: str, *, after: str | None = None, limit: int = 100, **filters: Unpack[Filters]
    ) -> TaskPage:
        query = Query(key=key, **filters)
        most, start = checked_page(limit), query.position(after, _Position)
        place = None if start is None else start.place
        shown, looked_at, more = list[TaskSummary](), 0, True
        while more and len(shown) < most and looked_at < LOOKED_AT:
            number = min(_AT_ONCE, LOOKED_AT - looked_at)
            if query.tenant is query.tag is query.worker is None:  # each record is shown
                number = min(number, most - len(shown))
            with self._transitions.step():
                query.check(self._transitions.store.settings(key))
                found = self._read(query, place, number + 1)
            more = len(found) > number
            for place, record in found[:number]:
                looked_at += 1
                if record is not None and query.matches(record):
                    shown.append(summary_of(record))
                    if len(shown) == most:
                        more = more or place != found[-1][0]
                        break
            await asyncio.sleep(0)
        return TaskPage(
            tasks=tuple(shown),
            next=query.cursor(_Position(place)) if more and place is not None else None,
            looked_at=looked_at,
        )

    def _read(
        self, query: Query, place: str | None, number: int
    ) -> list[tuple[str, Record | None]]:
        """Return the next records of a list that comes before its filters, each with its place."""
        store, key, newest = self._transitions.store, query.key, query.newest
        start = "" if query.tag is None else links_of(key, query.tag)
        first = start if query.since is None else place_at(query.since)
        last = start + AFTER_ALL if query.until is None else place_at(query.until)
        if place is not None and newest:
            last = min(last, start + place)
        elif place is not None:
            first = max(first, f"{start}{place} ")
        if query.tag is not None:
            links = store.links(first, last, number, newest=newest)
            places = [name.removeprefix(start) for name, _ in links]
            return [(each, store.load(key, each.partition(" ")[2])) for each in places]
        state = query.state or State.WAITING  # a list without a tag has a state
        found = store.listed(key, state, first, last, number, newest=newest)
        return [(record.place, record) for record in found]

    async def task(self, key: str, task_id: str) -> TaskDetail | None:
        with self._transitions.step() as now:
            record = self._transitions.find(key, task_id, now)
        return None if record is None or record.replaced is not None else detail_of(record)

    async def erase(self, key: str, tag: str, *, limit: int = 1000) -> Erasure:
        query, left = Query(key=key, tag=tag), checked_page(limit)
        transitions, states, more = self._transitions, Counter[State](), True
        while more and left:
            number = min(_AT_ONCE, left)
            with transitions.step() as now:
                query.check(transitions.store.settings(key))
                found = self._read(query, None, number + 1)
                for _, read in found[:number]:
                    record = None if read is None else transitions.present(read)
                    if record is None or record.state is None:
                        continue
                    states[record.state] += 1
                    if record.live:
                        transitions.move(record, State.CANCELLED, now)
                    elif record.state is State.DEAD:
                        transitions.move(record, State.DISCARDED, now)
                    transitions.drop(record)
            left, more = left - number, len(found) > number
            await asyncio.sleep(0)
        return Erasure(tasks=dict(states), more=more)
