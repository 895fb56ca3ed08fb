"""Lanes of waiting entries, and the plain order: a lane per priority, first in, first out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.tasks import State
from taskqueue_memory.due_heap import ROOM


class LaneItem(Entry, kw_only=True, eq=False):
    """An entry that may be in a lane."""

    seq: int = 0
    """its position in its lane; an item of a lane or heap with another one is out of date"""
    held: bool = False
    """waiting for its ordering key, in no lane"""


T = TypeVar("T", bound=LaneItem)


class Lane(Generic[T]):
    """Waiting entries in the order of becoming available; returned ones first.

    Entries leave lazily: one that was cancelled or moved meanwhile is dropped when it comes up, or once such entries
    outnumber the rest.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._bound = ROOM
        self._fresh: deque[tuple[int, T]] = deque()
        self._late: list[tuple[int, T]] = []
        """became available before some of the fresh, and were let in after them"""
        self._returned: list[tuple[int, T]] = []

    def append(self, record: T) -> None:
        """Add a newly available entry."""
        if len(self._fresh) >= self._bound:  # before the new item, which waits only in a moment
            self._clear()
        self._fresh.append((record.seq, record))

    def let_in(self, record: T) -> None:
        """Add an entry that became available earlier, at the place of its original sequence."""
        self._push(self._late, record)

    def put_back(self, record: T) -> None:
        """Add a returned entry, at the place of its original sequence."""
        self._push(self._returned, record)

    def pop(self) -> T | None:
        """Take the first entry."""
        record = self.peek()
        if record is not None:
            if self._returned:
                heapq.heappop(self._returned)
            elif self._late and self._late[0][1] is record:
                heapq.heappop(self._late)
            else:
                self._fresh.popleft()
        return record

    def peek(self) -> T | None:
        """Return the first entry, after dropping those that are out of date."""
        while self._fresh and not _waits(self._fresh[0]):
            self._fresh.popleft()
        if self._returned and (record := _first(self._returned)) is not None:
            return record
        fresh = self._fresh[0][1] if self._fresh else None
        if self._late and (record := _first(self._late)) is not None:
            return record if fresh is None or record.seq < fresh.seq else fresh
        return fresh

    def oldest(self) -> float | None:
        """Return since when the one that has waited the longest has been waiting."""
        heads = [self.peek(), _first(self._late), self._fresh[0][1] if self._fresh else None]
        return min((head.available_at for head in heads if head is not None), default=None)

    def returned(self) -> list[T]:
        """Return the released entries, in any order."""
        return [item[1] for item in self._returned if _waits(item)]

    def others(self) -> list[T]:
        """Return the entries that were not released, in any order."""
        return [item[1] for item in (*self._fresh, *self._late) if _waits(item)]

    def _push(self, heap: list[tuple[int, T]], record: T) -> None:
        if len(self._late) + len(self._returned) >= self._bound:
            self._clear()
        heapq.heappush(heap, (record.seq, record))

    def _clear(self) -> None:
        self._fresh = deque(item for item in self._fresh if _waits(item))
        for heap in (self._late, self._returned):
            heap[:] = [item for item in heap if _waits(item)]
            heapq.heapify(heap)
        self._bound = 2 * (len(self._fresh) + len(self._late) + len(self._returned)) + ROOM


class Lanes(Generic[T]):
    """The waiting entries of a queue in fifo order."""

    def __init__(self) -> None:
        """Start empty."""
        self._lanes: dict[int, Lane[T]] = {}

    def __iter__(self) -> Iterator[Lane[T]]:
        """Iterate over all lanes."""
        return iter(self._lanes.values())

    def lane(self, record: T) -> Lane[T]:
        """Return the lane of an entry."""
        priority = record.task.priority
        if priority not in self._lanes:
            self._lanes[priority] = Lane()
            self._lanes = dict(sorted(self._lanes.items(), reverse=True))
        return self._lanes[priority]

    def pop(self) -> T | None:
        """Take the first entry of the highest priority."""
        for lane in self._lanes.values():
            record = lane.pop()
            if record is not None:
                return record
        return None

    def heads(self) -> list[Lane[T]]:
        """Return the lane that is next in each priority that can be served, the highest first."""
        return [lane for lane in self if lane.peek() is not None]


def _first(heap: list[tuple[int, T]]) -> T | None:
    while heap:
        if _waits(heap[0]):
            return heap[0][1]
        heapq.heappop(heap)
    return None


def _waits(item: tuple[int, T]) -> bool:
    seq, record = item
    return record.state is State.WAITING and record.seq == seq


class OrderingKeys(Generic[T]):
    """The holder of each ordering key of a queue, and those that wait for it."""

    def __init__(self) -> None:
        """Start with no keys."""
        self._holders: dict[str, T] = {}
        self._held: dict[str, Lane[T]] = {}

    def __iter__(self) -> Iterator[Lane[T]]:
        """Iterate over the lanes of those that wait for their key."""
        return iter(self._held.values())

    def __len__(self) -> int:
        """Count the keys that are held."""
        return len(self._holders)

    def comes(self, record: T, key: str) -> None:
        """Have an entry that becomes available hold its key, or wait for it: it is ``held`` then."""
        record.held = self._holders.setdefault(key, record) is not record
        if record.held:
            self._held.setdefault(key, Lane()).append(record)

    def goes(self, record: T, key: str) -> T | None:
        """Release the key of an entry that ended or died. Return its next holder, ready for its lane."""
        if self._holders.get(key) is not record:
            return None
        lane = self._held.get(key)
        following = None if lane is None else lane.pop()
        if following is None:
            del self._holders[key]
            self._held.pop(key, None)
        else:
            self._holders[key] = following
            following.held = False
        return following
