"""One look at the store, and the five minutes before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.server.dashboard.gauges import Percentiles
from taskqueue_core.tasks import Health, Ledger, QueueStats, WorkerInfo

__all__ = ["HISTORY", "LISTED", "History", "Look", "Point", "Sample", "Window"]

HISTORY = 300
"""points, one a second"""
LISTED = 200
"""queues that one page shows, and whose history is kept; sums are over all of them"""
_WINDOW = 3.0
"""seconds over which a rate is told: calm enough to be read, quick enough to see a pause"""


class Look(msgspec.Struct, frozen=True):
    """One queue in one sample. The ledger is the store's, read in one step."""

    stats: QueueStats
    settings: QueueSettings
    run_time: Percentiles | None = None

    @property
    def ledger(self) -> Ledger:
        """The queue's books."""
        return self.stats.ledger


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at the store found."""

    number: int
    at: float
    """the store's time"""
    looks: Mapping[str, Look]
    workers: tuple[WorkerInfo, ...] = ()
    health: Health
    error: str | None = None
    """why the store could not be asked; what is shown then is what was found before"""

    def keys(self, may: Callable[[str], bool]) -> list[str]:
        """Return the queues that somebody may see, sorted."""
        return [key for key in self.looks if may(key)]

    def total(self, keys: Iterable[str]) -> Ledger:
        """Add ledgers up."""
        total = Ledger()
        for key in keys:
            total += self.looks[key].ledger
        return total

    def workers_of(self, may: Callable[[str], bool]) -> list[WorkerInfo]:
        """Return the workers all of whose keys somebody may see."""
        return [worker for worker in self.workers if all(map(may, worker.keys))]


class Point(msgspec.Struct, frozen=True):
    """One queue, or the sum of some, at one moment of the history."""

    published: int = 0
    done: int = 0
    waiting: int = 0
    scheduled: int = 0
    in_flight: int = 0
    p50: float | None = None
    p95: float | None = None

    @classmethod
    def of(cls, ledger: Ledger, run_time: Percentiles | None = None) -> Point:
        """Keep what is drawn."""
        return cls(
            published=ledger.published,
            done=ledger.done,
            waiting=ledger.waiting,
            scheduled=ledger.scheduled,
            in_flight=ledger.in_flight,
            p50=run_time.p50 if run_time else None,
            p95=run_time.p95 if run_time else None,
        )


class Window(msgspec.Struct, frozen=True):
    """Per second, over the last moments."""

    published: float = 0.0
    done: float = 0.0


_SHORTEST = 0.05


class _Row(NamedTuple):
    at: float
    points: Mapping[str, Point]
    total: Point

    def sum(self, keys: Sequence[str]) -> Point:
        """Add some queues up, which percentiles cannot be. Keys are sorted, here and there."""
        if len(keys) == 1:
            return self.points.get(keys[0], Point())
        if len(keys) == len(self.points) and all(key in self.points for key in keys):
            return self.total
        return _sum(self.points[key] for key in keys if key in self.points)


class History:
    """The last five minutes, in a ring."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque(maxlen=HISTORY)

    def add(self, sample: Sample) -> None:
        """Append a sample."""
        listed = list(sample.looks.items())[:LISTED]
        points = {key: Point.of(look.ledger, look.run_time) for key, look in listed}
        self._rows.append(_Row(sample.at, points, _sum(points.values())))

    def __len__(self) -> int:
        """Count the points."""
        return len(self._rows)

    def window(self, keys: Sequence[str]) -> Window:
        """Return how much flows through some queues."""
        if len(self._rows) <= 1:
            return Window()
        last = self._rows[-1]
        first = self._rows[-2]
        for row in reversed(self._rows):
            first = row if row is not last else first
            if last.at - first.at >= _WINDOW - 0.5:
                break
        return _between(first, last, keys)

    def rows(self, keys: Sequence[str], newest: int = HISTORY) -> list[list[float | None]]:
        """Return rows to draw, the oldest first: time, published/s, done/s, waiting, scheduled, in flight, p50, p95."""
        drawn: list[list[float | None]] = []
        before: _Row | None = None
        for row in list(self._rows)[-(newest + 1) :]:
            point, rates = row.sum(keys), list[float | None]((None, None))
            if before is not None:
                window = _between(before, row, keys)
                rates = [round(window.published, 2), round(window.done, 2)]
            depth = [point.waiting, point.scheduled, point.in_flight]
            drawn.append([round(row.at, 2), *rates, *depth, point.p50, point.p95])
            before = row
        return drawn[-newest:]

    def series(self, key: str, newest: int = 60) -> list[int]:
        """Return how many waited in a queue, for a small picture."""
        rows = islice(reversed(self._rows), newest)
        waiting = [row.points[key].waiting if key in row.points else 0 for row in rows]
        return waiting[::-1]


def _between(first: _Row, last: _Row, keys: Sequence[str]) -> Window:
    # One that was not there yet is left out: what it has did not all come in this moment.
    both = [key for key in keys if key in first.points and key in last.points]
    before, after, span = first.sum(both), last.sum(both), max(last.at - first.at, _SHORTEST)
    return Window(
        max(0.0, (after.published - before.published) / span),
        max(0.0, (after.done - before.done) / span),
    )


def _sum(points: Iterable[Point]) -> Point:
    published = done = waiting = scheduled = in_flight = 0
    for point in points:
        published += point.published
        done += point.done
        waiting += point.waiting
        scheduled += point.scheduled
        in_flight += point.in_flight
    return Point(published, done, waiting, scheduled, in_flight)
