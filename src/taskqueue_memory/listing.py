"""Lists of tasks in the memory backend: sorted with the first page of a state, and kept while pages are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from math import inf

from typing_extensions import Unpack

from taskqueue_core.authoring.listings import Filters, Query, checked_page, detail_of, summary_of
from taskqueue_core.capabilities import Erasure, TaskDetail, TaskPage, TaskSummary
from taskqueue_core.capabilities.listing import LOOKED_AT
from taskqueue_memory.records import QueueState
from taskqueue_memory.sorted_lists import Listed, Place, SortedLists, walk
from taskqueue_memory.transitions import MemoryStore

_UNUSED = 60.0
"""seconds without a page after which the lists of a queue are dropped"""


class MemoryListing:
    """The lists of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._lists: dict[QueueState, SortedLists] = {}

    async def tasks(
        self, key: str, *, after: str | None = None, limit: int = 100, **filters: Unpack[Filters]
    ) -> TaskPage:
        query = Query(key=key, **filters)
        most = checked_page(limit)
        queue = self._store.known(key)
        query.check(queue.settings)
        place = query.position(after, tuple[float, ...])
        shown, looked_at, more = list[TaskSummary](), 0, False
        for listed in await self._candidates(queue, query, place):
            more = len(shown) == most or looked_at == LOOKED_AT
            if more:
                break
            looked_at += 1
            place = listed.place
            if query.matches(listed.record):
                shown.append(summary_of(listed.record))
        following = query.cursor(place) if more else None
        return TaskPage(tasks=tuple(shown), next=following, looked_at=looked_at)

    async def task(self, key: str, task_id: str) -> TaskDetail | None:
        record = self._store.find(key, task_id)
        return None if record is None or record.replaced is not None else detail_of(record)

    async def erase(self, key: str, tag: str, *, limit: int = 1000) -> Erasure:
        query, most = Query(key=key, tag=tag), checked_page(limit)
        queue = self._store.known(key)
        query.check(queue.settings)
        found = [record for record, _ in islice(queue.tags.of(tag), most)]
        states = Counter(record.state for record in found if record.state is not None)
        for record in found:
            self._store.erase(record)
        return Erasure(tasks=dict(states), more=any(True for _ in queue.tags.of(tag)))

    async def _candidates(
        self, queue: QueueState, query: Query, start: Place | None
    ) -> Iterator[Listed]:
        """Return the records that come next of those that the state, the tag and the times select."""
        first: Place = () if query.since is None else (query.since,)
        last: Place = (inf,) if query.until is None else (query.until,)
        if start is not None:
            first, last = (first, min(last, start)) if query.newest else (max(first, start), last)
        if query.tag is not None:
            tagged = [Listed((number,), record) for record, number in queue.tags.of(query.tag)]
            return walk((tagged,), first, last, newest=query.newest)
        if query.state is None or not queue.records:
            return iter(())
        return await self._of(queue).of(query.state, first, last, newest=query.newest)

    def _of(self, queue: QueueState) -> SortedLists:
        now = self._store.clock.now()
        lists = self._lists.get(queue)
        if lists is None:
            lists = self._lists[queue] = SortedLists(queue, now)
            self._store.clock.call_at(now + _UNUSED, partial(self._drop_unused, queue))
        lists.used_at = now
        return lists

    def _drop_unused(self, queue: QueueState) -> None:
        ends = self._lists[queue].used_at + _UNUSED
        if ends <= self._store.clock.now():
            del self._lists[queue]
            queue.changed = None
        else:
            self._store.clock.call_at(ends, partial(self._drop_unused, queue))
