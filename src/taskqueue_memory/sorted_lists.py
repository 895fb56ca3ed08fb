"""The records of a queue in the order of its lists, kept from page to page while lists of the queue are read.

The first page of a state sorts the records that are in it. From then on `QueueState.changed` has each record that may
have got another place, and the next page adds it to a second, short list. Places are unique, and an entry is valid only
while its record has its place. After many changes, and after a time without pages, the lists are dropped.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from taskqueue_core.tasks import State
from taskqueue_memory.records import QueueState, TaskRecord

_AT_ONCE = 10_000
"""number of records that are looked at before other coroutines run"""
_CHANGES = 1000
"""number of changes after which the lists of a small queue are sorted again"""
_PART = 8
"""the same for a large queue: changes of one of so many records"""
_LANES = (State.WAITING, State.IN_FLIGHT)

Place: TypeAlias = tuple[float, ...]


class Listed(NamedTuple):
    """A record, and the place that it had in a list."""

    place: Place
    record: TaskRecord


_by_place = attrgetter("place")


class SortedLists:
    """The lists of one queue by state. ``used_at`` is the time of the last page."""

    def __init__(self, queue: QueueState, now: float) -> None:
        self.used_at = now
        self._queue = queue
        self._sorting = asyncio.Lock()
        self._restart()

    async def of(
        self, state: State, first: Place, last: Place, *, newest: bool
    ) -> Iterator[Listed]:
        """Return the records in a state between two places. Read them before other coroutines run."""
        async with self._sorting:
            self._catch_up()
            records = self._sorted.get(state)
            if records is None:
                records = await self._sort(state)
                self._sorted[state], self._recent[state] = records, []
                self._catch_up()
            recent = self._recent.get(state, [])
        found = walk((records, recent), first, last, newest=newest)
        return (listed for listed in found if self._is_valid(listed, state))

    def _restart(self) -> None:
        """Forget all lists, and note changes from now on."""
        self._left = max(_CHANGES, len(self._queue.records) // _PART)
        """number of changes that are added before the lists are sorted again"""
        self._sorted: dict[State, list[Listed]] = {}
        self._recent: dict[State, list[Listed]] = {}
        self._queue.changed = self._changed = deque[TaskRecord](maxlen=self._left)

    def _catch_up(self) -> None:
        """Add the records that have changed. If there were many changes, forget all lists."""
        self._left -= len(self._changed)
        if self._left <= 0:
            self._restart()
            return
        for record in self._changed:
            recent = None if record.state is None else self._recent.get(record.state)
            if recent is not None:
                insort(recent, Listed(_place(record), record), key=_by_place)
        self._changed.clear()

    async def _sort(self, state: State) -> list[Listed]:
        """Return the records that are in a state. `QueueState.changed` has those that change during the call."""
        found: list[Listed] = []
        for number, record in enumerate(list(self._queue.records.values()), 1):
            if record.state is state:
                found.append(Listed(_place(record), record))
            if not number % _AT_ONCE:
                await asyncio.sleep(0)
        found.sort(key=_by_place)
        return found

    def _is_valid(self, listed: Listed, state: State) -> bool:
        record = listed.record
        return (
            record.state is state
            and self._queue.records.get(record.task.id) is record
            and _place(record) == listed.place
        )


def walk(
    lists: Sequence[Sequence[Listed]], first: Place, last: Place, *, newest: bool
) -> Iterator[Listed]:
    """Yield the entries of sorted lists between two places, those with one place once; with ``newest``, downwards."""
    entries = []
    for each in lists:
        start = bisect_right(each, first, key=_by_place)
        places = range(start, bisect_left(each, last, start, key=_by_place))
        entries.append(map(each.__getitem__, reversed(places) if newest else places))
    shown: Place | None = None
    for listed in merge(*entries, key=_by_place, reverse=newest):
        if listed.place != shown:
            yield listed
        shown = listed.place


def _place(record: TaskRecord) -> Place:
    """Return the place of a record in the list of its state."""
    if record.state is State.SCHEDULED:
        return (record.at, record.seq)
    if record.state in _LANES:
        waiting = record.state is State.WAITING
        position = record.seq if waiting else record.returned or record.seq
        first = waiting and record.returned
        return (int(record.held), -record.task.priority, int(not first), position)
    return (record.seq,) if record.state is State.BLOCKED else (record.updated_at, record.seq)
