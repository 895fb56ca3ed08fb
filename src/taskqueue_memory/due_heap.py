"""Records by date. What has become pointless is dropped when it comes up, or once it outnumbers the rest."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_NEVER = float("inf")
ROOM = 64
"""so many items may be out of date before anything is cleared"""


R = TypeVar("R")


class DueHeap(Generic[R]):
    """A heap of records with a date each, in memory proportional to those that still matter."""

    def __init__(self, matters: Callable[[R, int], bool]) -> None:
        """Drop an item where ``matters``, given its record and the mark that it was noted with, says no."""
        self._matters = matters
        self._items: list[tuple[float, int, int, R]] = []
        self._order = itertools.count()
        self._bound = ROOM
        self.first = _NEVER
        """the first date, whether it still matters or not"""

    def __len__(self) -> int:
        """Count all items, those out of date included."""
        return len(self._items)

    def add(self, at: float, record: R, mark: int) -> None:
        """Add a due time of ``record``. The ``mark`` distinguishes it from other due times of the record."""
        # before the new item, which may matter only in a moment
        if len(self._items) >= self._bound:
            self._items = [item for item in self._items if self._matters(item[3], item[2])]
            heapq.heapify(self._items)
            self._bound = 2 * len(self._items) + ROOM
        heapq.heappush(self._items, (at, next(self._order), mark, record))
        self.first = self._items[0][0]

    def next_at(self) -> float | None:
        """Return the first date that still matters."""
        while self._items:
            at, _, mark, record = self._items[0]
            if self._matters(record, mark):
                return at
            self._pop()
        return None

    def take(self, now: float, chunk: int | None = None) -> Iterator[R]:
        """Take the records whose date has come, in its order, up to ``chunk`` of them."""
        taken = 0
        while (chunk is None or taken < chunk) and (at := self.next_at()) is not None and at <= now:
            taken += 1
            yield self._pop()

    def _pop(self) -> R:
        record = heapq.heappop(self._items)[3]
        self.first = self._items[0][0] if self._items else _NEVER
        return record
