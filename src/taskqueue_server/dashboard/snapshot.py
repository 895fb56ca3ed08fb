"""A sample of the store's statistics, and the history of the last five minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Health, Ledger, QueueStats, WorkerInfo
from taskqueue_server.dashboard.local_metrics import Percentiles

HISTORY = 300
"""seconds of history, with at most one point per second"""
LISTED = 100
"""maximum number of queues on a page; sums include the queues that are not shown"""
_MAX_HISTORIES = 2500
"""maximum number of queues with a history of their own"""
_WINDOW = 3.0
"""seconds over which a rate is computed: long enough to be steady, short enough to show a pause"""


class StoreReading(msgspec.Struct, frozen=True):
    """The statistics and settings of one queue in one sample."""

    stats: QueueStats
    settings: QueueSettings
    run_time: Percentiles | None = None
    """the last run times that were measured, if that was recently"""
    measured: bool = False
    """whether `run_time` is of this sample"""

    @property
    def ledger(self) -> Ledger:
        """The queue's ledger."""
        return self.stats.ledger


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """A sample of the store's statistics."""

    number: int
    at: float
    """time of the sample, by the store's clock"""
    readings: Mapping[str, StoreReading]
    workers: tuple[WorkerInfo, ...] = ()
    health: Health
    error: str | None = None
    """code of the error that made this sample fail; the sample then repeats the values of the previous sample"""

    def keys(self, may: Callable[[str], bool]) -> list[str]:
        """Return the queues for which ``may`` is true, sorted."""
        return [key for key in self.readings if may(key)]

    def total(self, keys: Iterable[str]) -> Ledger:
        """Return the sum of the queues' ledgers."""
        total = Ledger()
        for key in keys:
            total += self.readings[key].ledger
        return total

    def workers_of(self, may: Callable[[str], bool]) -> list[WorkerInfo]:
        """Return the workers that subscribe only to queues for which ``may`` is true."""
        return [worker for worker in self.workers if all(map(may, worker.keys))]


class Point(NamedTuple):
    """One point of the history, for one queue or for several queues together."""

    published: int = 0
    """number of tasks published since the history began or the queue appeared, from which rates are computed"""
    done: int = 0
    dead: int = 0
    waiting: int = 0
    scheduled: int = 0
    in_flight: int = 0
    p50: float | None = None
    p95: float | None = None


_ZERO = Point()


class MetricsWindow(msgspec.Struct, frozen=True):
    """Rates per second over the last few seconds; 0 if they were not measured."""

    published: float = 0.0
    done: float = 0.0
    dead: float = 0.0


_SHORTEST = 0.05


class _Row(NamedTuple):
    at: float
    points: Mapping[str, Point]
    total: Point
    after_gap: bool
    """whether nothing was measured for a while before this sample"""

    def sum(self, keys: Sequence[str] | None) -> Point:
        """Return the sum over ``keys`` (``None``: all queues), with percentiles only for a single queue."""
        if keys is None:
            return self.total
        if len(keys) == 1:
            return self.points.get(keys[0], _ZERO)
        return _sum(self.points[key] for key in keys if key in self.points)


class History:
    """The samples of the last five minutes. If a method has an argument ``keys``, ``None`` means all queues."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque(maxlen=HISTORY)
        self._before: Mapping[str, StoreReading] = {}

    def add(self, snapshot: Snapshot, *, after_gap: bool = False) -> None:
        """Append a sample. ``after_gap``: the store was not read, or did not answer, for a while before it."""
        last = self._rows[-1] if self._rows else _Row(snapshot.at, {}, _ZERO, after_gap=True)
        while self._rows and self._rows[0].at <= snapshot.at - HISTORY:
            self._rows.popleft()
        points = dict[str, Point]()
        published, done, dead = last.total[:3]
        waiting = scheduled = in_flight = 0
        for number, (key, reading) in enumerate(snapshot.readings.items()):
            ledger = reading.ledger
            before = self._before[key].ledger if key in self._before else ledger
            new_published = max(0, ledger.published - before.published)
            new_done = max(0, ledger.done - before.done)
            new_dead = max(0, ledger.dead - before.dead)
            published, done = published + new_published, done + new_done
            dead += new_dead
            waiting += ledger.waiting
            scheduled += ledger.scheduled
            in_flight += ledger.in_flight
            if number < _MAX_HISTORIES:
                point = last.points.get(key, _ZERO)
                depth = (ledger.waiting, ledger.scheduled, ledger.in_flight)
                run_time = reading.run_time if reading.measured else None
                now = Point(
                    point.published + new_published,
                    point.done + new_done,
                    point.dead + new_dead,
                    *depth,
                    *((run_time.p50, run_time.p95) if run_time else ()),
                )
                points[key] = point if now == point else now
        total = Point(published, done, dead, waiting, scheduled, in_flight)
        self._before = snapshot.readings
        self._rows.append(_Row(snapshot.at, points, total, after_gap))

    def __len__(self) -> int:
        return len(self._rows)

    def window(self, keys: Sequence[str] | None) -> MetricsWindow:
        """Return the rates of the queues ``keys``, all together, over the last few seconds."""
        if len(self._rows) <= 1 or self._rows[-1].after_gap:
            return MetricsWindow()
        last = first = self._rows[-1]
        for row in reversed(self._rows):
            first = row
            if row.after_gap or last.at - first.at >= _WINDOW - 0.5:
                break
        return _between(first.at, first.sum(keys), last.at, last.sum(keys))

    def rows(
        self, keys: Sequence[str] | None, newest: int = HISTORY
    ) -> Iterator[list[float | None]]:
        """Yield rows of the charts, oldest first: time, published/s, done/s, waiting, scheduled, in flight, p50, p95.

        Before the first row after a gap, there is a row of nulls, so that a chart is not drawn across the gap. Rows are
        computed one by one, because computing all rows at once would block the event loop.
        """
        shown = list(self._rows)[-(newest + 1) :]
        before: tuple[float, Point] | None = None
        after_gap = False
        for number, row in enumerate(shown):
            after_gap = after_gap or row.after_gap
            if keys is not None and len(keys) == 1 and keys[0] not in row.points:
                continue
            point, rates = row.sum(keys), list[float | None]((None, None))
            if after_gap and before is not None:
                if number >= len(shown) - newest:
                    yield [round((before[0] + row.at) / 2, 2), *[None] * 7]
            elif before is not None:
                window = _between(*before, row.at, point)
                rates = [round(window.published, 2), round(window.done, 2)]
            before, after_gap = (row.at, point), False
            if number >= len(shown) - newest:
                depth = [point.waiting, point.scheduled, point.in_flight]
                yield [round(row.at, 2), *rates, *depth, point.p50, point.p95]

    def series(self, key: str, newest: int = 60) -> list[int | None]:
        """Return the queue's number of waiting tasks in each of the last samples, for a sparkline.

        ``None`` means a gap, or a sample without the queue.
        """
        series: list[int | None] = []
        for row in list(self._rows)[-newest:]:
            if row.after_gap and series:
                series.append(None)
            series.append(row.points[key].waiting if key in row.points else None)
        return series


def _between(since: float, before: Point, until: float, after: Point) -> MetricsWindow:
    span = max(until - since, _SHORTEST)
    return MetricsWindow(
        max(0.0, (after.published - before.published) / span),
        max(0.0, (after.done - before.done) / span),
        max(0.0, (after.dead - before.dead) / span),
    )


def _sum(points: Iterable[Point]) -> Point:
    return Point(*map(sum, zip(*(point[:6] for point in points), strict=True)))
