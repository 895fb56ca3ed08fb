"""Lanes of waiting entries, and the fifo order of a queue: one lane per priority, first in, first out."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.tasks import State
from taskqueue_memory.due_heap import ROOM


class LaneItem(Entry, kw_only=True, eq=False):
    """An entry with the fields that a lane needs."""

    seq: int = 0
    """position in the lane; an item of a lane or heap is outdated once its entry has another ``seq``"""
    returned: int = 0
    """not 0 if the entry was released, and therefore precedes others in its lane; the position of its next delivery"""
    held: bool = False
    """whether the entry waits for its ordering key and is therefore in no lane of the queue"""


T = TypeVar("T", bound=LaneItem)


class Lane(Generic[T]):
    """Waiting entries in order of availability, redelivered entries first.

    Entries that were cancelled or moved to another lane are not removed at once, but skipped and removed later.
    """

    def __init__(self) -> None:
        self._bound = ROOM
        self._fresh: deque[tuple[int, T]] = deque()
        self._late: list[tuple[int, T]] = []
        """entries that became available before some entries of ``_fresh`` but were added after them"""
        self._returned: list[tuple[int, T]] = []

    def append(self, record: T) -> None:
        if (
            len(self._fresh) >= self._bound
        ):  # clear before adding, because the new entry is not in state WAITING yet and would be removed
            self._clear()
        record.returned = 0
        self._fresh.append((record.seq, record))

    def let_in(self, record: T) -> None:
        """Insert an entry that became available earlier, at the position of its sequence number."""
        record.returned = 0
        self._push(self._late, record)

    def put_back(self, record: T) -> None:
        """Insert a redelivered entry at the position of its sequence number among the redelivered entries."""
        record.returned = 1
        self._push(self._returned, record)

    def pop(self) -> T | None:
        """Remove and return the first entry; return None if the lane is empty."""
        if not self._returned and not self._late:  # so for most deliveries
            while self._fresh:
                seq, head = self._fresh.popleft()  # as in `_waits`, because each receive comes here
                if head.state is State.WAITING and head.seq == seq:
                    return head
            return None
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
        """Return the first entry, after removing outdated entries; return None if the lane is empty."""
        while self._fresh and not _waits(self._fresh[0]):
            self._fresh.popleft()
        if self._returned and (record := _first(self._returned)) is not None:
            return record
        fresh = self._fresh[0][1] if self._fresh else None
        if self._late and (record := _first(self._late)) is not None:
            return record if fresh is None or record.seq < fresh.seq else fresh
        return fresh

    def oldest(self) -> float | None:
        """Return the time at which the longest-waiting entry became available; None if the lane is empty."""
        heads = [self.peek(), _first(self._late), self._fresh[0][1] if self._fresh else None]
        return min((head.available_at for head in heads if head is not None), default=None)

    def returned(self) -> list[T]:
        """Return the redelivered entries, in no particular order."""
        return [item[1] for item in self._returned if _waits(item)]

    def others(self) -> list[T]:
        """Return the entries that were not redelivered, in no particular order."""
        return [item[1] for item in (*self._fresh, *self._late) if _waits(item)]

    def _push(self, heap: list[tuple[int, T]], record: T) -> None:
        if len(self._late) + len(self._returned) >= self._bound:
            self._clear()
        heapq.heappush(heap, (record.seq, record))

    def _clear(self) -> None:
        waits = State.WAITING
        self._fresh = deque(
            [(seq, each) for seq, each in self._fresh if each.state is waits and each.seq == seq]
        )
        for heap in (self._late, self._returned):
            heap[:] = [item for item in heap if _waits(item)]
            heapq.heapify(heap)
        self._bound = 2 * (len(self._fresh) + len(self._late) + len(self._returned)) + ROOM


class Lanes(Generic[T]):
    """The waiting entries of a queue in fifo order, in one lane per priority."""

    def __init__(self) -> None:
        self._lanes: dict[int, Lane[T]] = {}

    def __iter__(self) -> Iterator[Lane[T]]:
        return iter(self._lanes.values())

    def lane(self, record: T) -> Lane[T]:
        """Return the lane of an entry's priority; create it if it does not exist."""
        priority = record.task.priority
        lane = self._lanes.get(priority)
        if lane is None:
            lane = self._lanes[priority] = Lane()
            self._lanes = dict(sorted(self._lanes.items(), reverse=True))
        return lane

    def pop(self) -> T | None:
        """Remove and return the first entry of the highest non-empty priority; return None if all lanes are empty."""
        for lane in self._lanes.values():
            record = lane.pop()
            if record is not None:
                return record
        return None

    def heads(self) -> dict[int, Lane[T]]:
        """Return the lanes that are not empty by priority, the highest priority first."""
        return {n: lane for n, lane in self._lanes.items() if lane.peek() is not None}


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
    """The entry that holds each ordering key of a queue, and the entries that wait for a key."""

    def __init__(self) -> None:
        self._holders: dict[str, T] = {}
        self._held: dict[str, Lane[T]] = {}

    def __iter__(self) -> Iterator[Lane[T]]:
        """Iterate over the lanes of entries that wait for an ordering key."""
        return iter(self._held.values())

    def comes(self, record: T, key: str) -> None:
        """Give an ordering key to an available entry. If the key is taken, set ``held``, so that the entry waits."""
        record.held = self._holders.setdefault(key, record) is not record
        if record.held:
            self._held.setdefault(key, Lane()).append(record)

    def goes(self, record: T, key: str) -> T | None:
        """Release the ordering key of an ended or dead entry. Return the next holder of the key, or None."""
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
