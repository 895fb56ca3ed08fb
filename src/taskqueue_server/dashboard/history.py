"""The history that charts draw for 15 minutes, an hour and a day. It is recorded while the server runs."""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from taskqueue_core.tasks import Ledger, QueueStats
from taskqueue_server.context.statistics import StatisticsReader

MAX_HISTORIES = 1000
"""maximum number of queues with a history of their own; the sum over all queues includes the others"""
_WIDTH = 7
"""values of a row: published/s, done/s, waiting, scheduled, in flight, p50, p95"""
_NONE = (math.nan,) * _WIDTH
_PATIENCE = 10.0
_YOUNG = 5.0
"""age in seconds up to which a sample is the last read of an open page, instead of one of its own"""
_SHARE = 100
"""the pause after a sample is at least this many times the sample's duration, to take 1 % of the time"""
_LATE = 2.5
"""number of pauses after which a sample is late: nothing was measured before it"""
_SHORTEST = 0.05
Counts = Mapping[str, Sequence[int]]
"""by queue, the number of run times in each bucket since the process started"""
_log = logging.getLogger("taskqueue.server.dashboard")


class Range(NamedTuple):
    """A time range that the reader of a chart can choose."""

    name: str
    label: str
    seconds: int
    step: int
    """seconds between two rows"""


LIVE = Range("live", "5 min", 300, 1)
"""the range that pages poll themselves, every second"""
RANGES: dict[str, Range] = {
    one.name: one
    for one in (
        LIVE,
        Range("15m", "15 min", 900, 15),
        Range("1h", "1 h", 3600, 15),
        Range("24h", "24 h", 86400, 300),
    )
}


class _Rows:
    """The rows of one queue. They are kept in an array of 4-byte numbers: 28 bytes a row."""

    __slots__ = ("_values", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        """number of the oldest row"""
        self._values = array("f")

    def add(self, row: Sequence[float], kept: int) -> None:
        self._values.extend(row)
        if len(self._values) >= 2 * kept * _WIDTH:
            surplus = len(self._values) // _WIDTH - kept
            del self._values[: surplus * _WIDTH]
            self.first += surplus

    def get(self, number: int) -> Sequence[float] | None:
        """Return a row; ``None`` if the queue had no history at that time."""
        start = (number - self.first) * _WIDTH
        return self._values[start : start + _WIDTH] if start >= 0 else None

    @property
    def is_empty(self) -> bool:
        return all(math.isnan(value) for value in self._values)


class Resolution:
    """The rows of all queues with a fixed step, and their sum."""

    def __init__(self, step: int, seconds: int, bounds: Sequence[float]) -> None:
        """Keep rows for ``seconds``, one each ``step`` seconds. ``bounds`` are the upper bounds of the run times."""
        self._step = step
        self._kept = seconds // step
        self._bounds = bounds
        self._times: deque[float] = deque(maxlen=self._kept)
        self._count = 0
        """number of rows that were added"""
        self._total = _Rows(0)
        self._queues: dict[str, _Rows] = {}
        self._most: dict[str, tuple[int, int, int]] = {}
        self._most_total = (0, 0, 0)
        self._before: tuple[float, dict[str, Ledger], Counts] | None = None

    def add(self, at: float, queues: Sequence[QueueStats], counts: Counts, *, late: bool) -> None:
        """Take a sample; it becomes a row if a step has passed since the last row.

        Depths are the highest of the samples of a row. ``late``: nothing was measured for a while before the sample.
        """
        ledgers = {stats.key: stats.ledger for stats in queues}
        depths = {key: (one.waiting, one.scheduled, one.in_flight) for key, one in ledgers.items()}
        total = _sum(depths.values())
        if late or self._before is None:
            if self._times:
                self._append((self._times[-1] + at) / 2, {}, _NONE)
            self._begin(at, ledgers, counts)
            return
        for key, depth in depths.items():
            self._most[key] = _highest(self._most.get(key, depth), depth)
        self._most_total = _highest(self._most_total, total)
        began, before, counted = self._before
        if at - began < self._step * 0.9:
            return
        span = max(at - began, _SHORTEST)
        rows: dict[str, Sequence[float]] = {}
        published = done = 0
        for key, ledger in ledgers.items():
            old = before.get(key, ledger)
            new = max(0, ledger.published - old.published), max(0, ledger.done - old.done)
            published, done = published + new[0], done + new[1]
            times = _percentiles(counts.get(key, ()), counted.get(key, ()), self._bounds)
            rows[key] = (new[0] / span, new[1] / span, *self._most[key], *times)
        whole = (published / span, done / span, *self._most_total, math.nan, math.nan)
        self._append(at, rows, whole)
        self._begin(at, ledgers, counts)

    def _begin(self, at: float, ledgers: dict[str, Ledger], counts: Counts) -> None:
        self._before = at, ledgers, {key: tuple(some) for key, some in counts.items()}
        self._most, self._most_total = {}, (0, 0, 0)

    def _append(
        self, at: float, rows: Mapping[str, Sequence[float]], total: Sequence[float]
    ) -> None:
        number, self._count = self._count, self._count + 1
        self._times.append(at)
        self._total.add(total, self._kept)
        for key, row in rows.items():
            if key not in self._queues and len(self._queues) < MAX_HISTORIES and any(row[:5]):
                self._queues[key] = _Rows(number)
        for key, history in list(self._queues.items()):
            history.add(rows.get(key, _NONE), self._kept)
            if key not in rows and history.is_empty:
                del self._queues[key]

    def rows(
        self, keys: Sequence[str] | None, seconds: float, newest: int | None = None
    ) -> Iterator[list[float | None]]:
        """Yield rows of the charts, oldest first, with their time; at most the ``newest``.

        ``keys`` are the queues to sum up (``None``: all queues); only a single queue has percentiles. A row without
        values is a gap. Rows are computed one by one, because computing all of them could block the event loop.
        """
        times = list(self._times)
        chosen = [self._queues[key] for key in keys or () if key in self._queues]
        since = times[-1] - seconds if times else 0.0
        start = 0 if newest is None else max(0, len(times) - newest)
        for index in range(start, len(times)):
            if times[index] < since:
                continue
            number = self._count - len(times) + index
            histories = [self._total] if keys is None else chosen
            found = [row for one in histories if (row := one.get(number)) is not None]
            row = found[0] if found else self._idle(number)
            if keys is not None and len(keys) > 1 and found:
                row = [*map(sum, zip(*(one[:5] for one in found), strict=True)), *_NONE[5:]]
            yield [round(times[index], 2), *map(_shown, row)]

    def _idle(self, number: int) -> Sequence[float]:
        """Return the row of a queue without a history: zeros where something was measured."""
        total = self._total.get(number)
        measured = total is not None and not math.isnan(total[0])
        return (0.0,) * 5 + _NONE[5:] if measured else _NONE


class HistoryRecorder:
    """Reads the store's statistics every 15 s, or less often if that takes long, for as long as the server runs.

    A page shows its own samples, of each second, for the last five minutes.
    """

    def __init__(
        self,
        statistics: StatisticsReader,
        run_times: Callable[[], Counts],
        bounds: Sequence[float],
    ) -> None:
        """Record what ``statistics`` reads. ``run_times`` gives the counts of this process."""
        self._statistics, self._run_times = statistics, run_times
        by_step: dict[int, int] = {}
        for one in RANGES.values():
            if one is not LIVE:
                by_step[one.step] = max(one.seconds, by_step.get(one.step, 0))
        self._resolutions = {
            step: Resolution(step, seconds, bounds) for step, seconds in by_step.items()
        }
        self._last: float | None = None
        self._pause = float(min(by_step))

    async def run(self) -> None:
        """Record until cancelled."""
        loop = asyncio.get_running_loop()
        shortest = float(min(self._resolutions))
        while True:
            began = loop.time()
            paused = await self.record()
            self._pause = max(shortest, _SHARE * (loop.time() - began - paused))
            await asyncio.sleep(self._pause)

    async def record(self) -> float:
        """Take one sample. An error of the store leaves a gap. Return for how many seconds the read was paused."""
        read, paused = self._statistics.recent(_YOUNG), 0.0
        try:
            if read is None:
                async with asyncio.timeout(_PATIENCE):
                    read = await self._statistics.read()
                paused = read.paused
        except Exception as error:  # noqa: BLE001 - the next sample may succeed
            self._last = None
            _log.debug("no sample for the history", extra={"error": type(error).__name__})
            return 0.0
        at, counts = read.at, self._run_times()
        late = self._last is None or at - self._last > _LATE * self._pause
        queues = tuple(read.queues.values())
        for resolution in self._resolutions.values():
            resolution.add(at, queues, counts, late=late)
        self._last = at
        return paused

    def rows(
        self, keys: Sequence[str] | None, chosen: Range, newest: int | None = None
    ) -> Iterator[list[float | None]]:
        """Yield the rows of a range; see `Resolution.rows`."""
        return self._resolutions[chosen.step].rows(keys, chosen.seconds, newest)


def _highest(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])


def _sum(depths: Iterable[tuple[int, int, int]]) -> tuple[int, int, int]:
    waiting = scheduled = in_flight = 0
    for one in depths:
        waiting, scheduled, in_flight = waiting + one[0], scheduled + one[1], in_flight + one[2]
    return waiting, scheduled, in_flight


def _shown(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _percentiles(
    counts: Sequence[int], before: Sequence[int], bounds: Sequence[float]
) -> tuple[float, float]:
    """Return the median and the 95th percentile of the run times counted since ``before``."""
    new = [now - old for now, old in zip(counts, before or (0,) * len(counts), strict=True)]
    whole = sum(new)
    if not whole:
        return math.nan, math.nan
    sums, total = list[int](), 0
    for number in new:
        total += number
        sums.append(total)
    found = [bisect_left(sums, math.ceil(share * whole)) for share in (0.5, 0.95)]
    first, second = (bounds[min(index, len(bounds) - 1)] for index in found)
    return first, second
