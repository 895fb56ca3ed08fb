"""One look at the store, and the five minutes before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Health, Ledger, QueueStats, WorkerInfo
from taskqueue_server.dashboard.local_metrics import Percentiles

HISTORY = 300
"""seconds, with one point each at the most"""
LISTED = 200
"""queues that one page shows; sums are over all of them"""
_KEPT = 1000
"""queues whose own history is kept"""
_WINDOW = 3.0
"""seconds over which a rate is told: calm enough to be read, quick enough to see a pause"""


class StoreReading(msgspec.Struct, frozen=True):
    """One queue in one sample. The ledger is the store's, read in one step."""

    stats: QueueStats
    settings: QueueSettings
    run_time: Percentiles | None = None

    @property
    def ledger(self) -> Ledger:
        """The queue's books."""
        return self.stats.ledger


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at the store found."""

    number: int
    at: float
    """the store's time"""
    readings: Mapping[str, StoreReading]
    workers: tuple[WorkerInfo, ...] = ()
    health: Health
    error: str | None = None
    """why could not read the store for the dashboard; what is shown then is what was found before"""

    def keys(self, may: Callable[[str], bool]) -> list[str]:
        """Return the queues that somebody may see, sorted."""
        return [key for key in self.readings if may(key)]

    def total(self, keys: Iterable[str]) -> Ledger:
        """Add ledgers up."""
        total = Ledger()
        for key in keys:
            total += self.readings[key].ledger
        return total

    def workers_of(self, may: Callable[[str], bool]) -> list[WorkerInfo]:
        """Return the workers all of whose keys somebody may see."""
        return [worker for worker in self.workers if all(map(may, worker.keys))]


class Point(NamedTuple):
    """One queue, or the sum of some, at one moment of the history."""

    published: int = 0
    """since the history began, or the queue was there: what it had before did not come while somebody looked"""
    done: int = 0
    waiting: int = 0
    scheduled: int = 0
    in_flight: int = 0
    p50: float | None = None
    p95: float | None = None

    def then(self, reading: StoreReading, came: int, went: int) -> Point:
        """Return the point after this one."""
        ledger, run_time = reading.ledger, reading.run_time
        return Point(
            self.published + came,
            self.done + went,
            ledger.waiting,
            ledger.scheduled,
            ledger.in_flight,
            run_time.p50 if run_time else None,
            run_time.p95 if run_time else None,
        )


_NOTHING = Point()


class MetricsWindow(msgspec.Struct, frozen=True):
    """Per second, over the last moments."""

    published: float = 0.0
    done: float = 0.0


_SHORTEST = 0.05


class _Row(NamedTuple):
    at: float
    points: Mapping[str, Point]
    total: Point

    def sum(self, keys: Sequence[str] | None) -> Point:
        """Add some queues up, or all; percentiles cannot be added."""
        if keys is None:
            return self.total
        if len(keys) == 1:
            return self.points.get(keys[0], _NOTHING)
        return _sum(self.points[key] for key in keys if key in self.points)


class History:
    """The last five minutes, in a ring. Where keys are asked for, ``None`` stands for all there are."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque(maxlen=HISTORY)
        self._before: Mapping[str, StoreReading] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Append a sample."""
        last = self._rows[-1] if self._rows else _Row(snapshot.at, {}, _NOTHING)
        while self._rows and self._rows[0].at <= snapshot.at - HISTORY:
            self._rows.popleft()
        points = dict[str, Point]()
        published, done = last.total.published, last.total.done
        waiting = scheduled = in_flight = 0
        for number, (key, reading) in enumerate(snapshot.readings.items()):
            ledger = reading.ledger
            before = self._before[key].ledger if key in self._before else ledger
            came = max(0, ledger.published - before.published)
            went = max(0, ledger.done - before.done)
            published, done = published + came, done + went
            waiting += ledger.waiting
            scheduled += ledger.scheduled
            in_flight += ledger.in_flight
            if number < _KEPT:
                point = last.points.get(key, _NOTHING)
                now = point.then(reading, came, went)
                points[key] = point if now == point else now
        total = Point(published, done, waiting, scheduled, in_flight)
        self._before = snapshot.readings
        self._rows.append(_Row(snapshot.at, points, total))

    def __len__(self) -> int:
        """Count the points."""
        return len(self._rows)

    def window(self, keys: Sequence[str] | None) -> MetricsWindow:
        """Return how much flows through some queues."""
        if len(self._rows) <= 1:
            return MetricsWindow()
        last = self._rows[-1]
        first = self._rows[-2]
        for row in reversed(self._rows):
            first = row if row is not last else first
            if last.at - first.at >= _WINDOW - 0.5:
                break
        return _between(first.at, first.sum(keys), last.at, last.sum(keys))

    def rows(
        self, keys: Sequence[str] | None, newest: int = HISTORY
    ) -> Iterator[list[float | None]]:
        """Return rows to draw, the oldest first: time, published/s, done/s, waiting, scheduled, in flight, p50, p95.

        Each is made when it is taken: many rows of many queues are more than is done at one go.
        """
        shown = list(self._rows)[-(newest + 1) :]
        before: tuple[float, Point] | None = None
        for number, row in enumerate(shown):
            if keys is not None and len(keys) == 1 and keys[0] not in row.points:
                continue
            point, rates = row.sum(keys), list[float | None]((None, None))
            if before is not None:
                window = _between(*before, row.at, point)
                rates = [round(window.published, 2), round(window.done, 2)]
            before = (row.at, point)
            if number >= len(shown) - newest:
                depth = [point.waiting, point.scheduled, point.in_flight]
                yield [round(row.at, 2), *rates, *depth, point.p50, point.p95]

    def series(self, key: str, newest: int = 60) -> list[int]:
        """Return how many waited in a queue, for a small picture."""
        rows = islice(reversed(self._rows), newest)
        waiting = [row.points[key].waiting if key in row.points else 0 for row in rows]
        return waiting[::-1]


def _between(since: float, before: Point, until: float, after: Point) -> MetricsWindow:
    span = max(until - since, _SHORTEST)
    return MetricsWindow(
        max(0.0, (after.published - before.published) / span),
        max(0.0, (after.done - before.done) / span),
    )


def _sum(points: Iterable[Point]) -> Point:
    return Point(*map(sum, zip(*(point[:5] for point in points), strict=True)))
