"""Which queues a page of the overview shows: search, order and page, as in its query."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

from taskqueue_server.dashboard.history import LIVE, RANGES
from taskqueue_server.dashboard.snapshot import LISTED, Snapshot, StoreReading

_MAX_SEARCH = 200
_MAX_DIGITS = 6
NAME = "name"
COLUMNS: Mapping[str, Callable[[StoreReading], float]] = {
    "waiting": lambda reading: reading.ledger.waiting,
    "blocked": lambda reading: reading.ledger.blocked,
    "scheduled": lambda reading: reading.ledger.scheduled,
    "in_flight": lambda reading: reading.ledger.in_flight,
    "oldest": lambda reading: -(reading.stats.oldest_waiting or float("inf")),
    "p95": lambda reading: reading.run_time.p95 if reading.run_time else -1.0,
    "dead": lambda reading: reading.ledger.dead,
}
"""by column: the number by which queues are sorted, the highest first; by default they are sorted by name"""


class OverviewQuery(NamedTuple):
    """What the overview shows. The page of a queue uses the range of the charts only."""

    search: str = ""
    """part of a queue's name; empty for all queues"""
    sort: str = NAME
    page: int = 1
    range: str = LIVE.name

    @classmethod
    def of(cls, query: QueryParams) -> OverviewQuery:
        """Return what a query asks for; invalid values count as not given."""
        search, sort, page, time = (query.get(name, "") for name in cls._fields)
        number = int(page) if page.isdecimal() and len(page) <= _MAX_DIGITS else 1
        sort = sort if sort in COLUMNS else NAME
        time = time if time in RANGES else LIVE.name
        return cls(search.strip()[:_MAX_SEARCH], sort, max(1, number), time)

    def query(self, **changes: Any) -> str:
        """Return the query of a page, with some changes."""
        chosen, usual = self._replace(**changes)._asdict(), self._field_defaults
        return urlencode({name: value for name, value in chosen.items() if value != usual[name]})

    def found(self, snapshot: Snapshot, keys: Sequence[str]) -> list[str]:
        """Return those of the queues ``keys``, which are sorted by name, that the search finds, in their order."""
        part = self.search.casefold()
        found = [key for key in keys if part in key.casefold()] if part else list(keys)
        if self.sort != NAME:
            number = COLUMNS[self.sort]
            found.sort(key=lambda key: number(snapshot.readings[key]), reverse=True)
        return found

    def shown(self, found: Sequence[str]) -> Sequence[str]:
        """Return the queues on this page; those on the last page if there are fewer pages."""
        first = (min(self.page, self.pages(found)) - 1) * LISTED
        return found[first : first + LISTED]

    @staticmethod
    def pages(found: Sequence[str]) -> int:
        """Return the number of pages."""
        return max(1, -(-len(found) // LISTED))
