"""A heap of records by due time. Outdated items are dropped when they reach the top or outnumber the current items."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_NEVER = float("inf")
ROOM = 64
"""minimum number of items at which a whole heap or lane is searched for outdated items"""


R = TypeVar("R")


class DueHeap(Generic[R]):
    """A heap of records by due time. Its size is proportional to the number of items that are not outdated."""

    def __init__(self, matters: Callable[[R, int], bool]) -> None:
        """Create a heap. An item is outdated if ``matters``, called with its record and its mark, returns False."""
        self._matters = matters
        self._items: list[tuple[float, int, int, R]] = []
        self._order = itertools.count()
        self._bound = ROOM
        self.first = _NEVER
        """the earliest due time, even if its item is outdated; infinity if the heap is empty"""

    def __len__(self) -> int:
        """Return the number of items, including outdated ones."""
        return len(self._items)

    def add(self, at: float, record: R, mark: int) -> None:
        """Add a due time of ``record``. The ``mark`` distinguishes it from the record's other due times."""
        # Remove outdated items before the new item is added, because the new item may look outdated: the caller may
        # update the record's state only after this call.
        if len(self._items) >= self._bound:
            self._items = [item for item in self._items if self._matters(item[3], item[2])]
            heapq.heapify(self._items)
            self._bound = 2 * len(self._items) + ROOM
        heapq.heappush(self._items, (at, next(self._order), mark, record))
        self.first = self._items[0][0]

    def next_at(self) -> float | None:
        """Return the earliest due time that is not outdated; None if there is none."""
        while self._items:
            at, _, mark, record = self._items[0]
            if self._matters(record, mark):
                return at
            self._pop()
        return None

    def take(self, now: float, chunk: int | None = None) -> Iterator[R]:
        """Remove and yield up to ``chunk`` records that are due at time ``now``, the earliest first."""
        taken = 0
        while (chunk is None or taken < chunk) and (at := self.next_at()) is not None and at <= now:
            taken += 1
            yield self._pop()

    def _pop(self) -> R:
        record = heapq.heappop(self._items)[3]
        self.first = self._items[0][0] if self._items else _NEVER
        return record
