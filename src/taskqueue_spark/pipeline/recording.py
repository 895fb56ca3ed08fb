"""What a recording of a queue says about its load, and how far the recording can be trusted. Uses NumPy only.

Neighbouring waits depend on each other for about one relaxation time, the time after which a queue has forgotten its
state. A recording is therefore divided into blocks that are longer, and the blocks are resampled as wholes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from taskqueue_spark.pipeline.queueing import Floats, scv

RESAMPLES = 200
_CONFIDENCE = 0.975
"""share of the resamples that must meet a target"""
_BLOCKS = 10
"""minimum number of blocks from which a bound is computed"""
_RELAXED = 2.0
"""minimum length of a block, in relaxation times"""
_DRIFT = 0.15
"""relative difference between the halves of a recording from which on it drifts, if chance does not explain it"""
_EXTRAPOLATED = 1.15
"""maximum factor by which tasks may take longer beyond the highest concurrency that was recorded"""
_SIGNIFICANT = 4.0
"""number of standard errors above which chance does not explain a difference"""


class Contention(NamedTuple):
    """How running times grow with the number of tasks that run at once, by the universal scalability law."""

    waiting: float
    """growth per additional task, from waiting for a shared resource"""
    crosstalk: float
    """growth per pair of tasks, from keeping each other consistent"""
    most: int
    """the highest concurrency in the recording; the growth beyond it is extrapolated"""

    @property
    def reach(self) -> int:
        """The highest concurrency to which the growth may be extrapolated: tasks may be only a little slower there."""
        known = _EXTRAPOLATED * self.factor(self.most)
        further = range(self.most + 1, 2 * self.most + 1)
        return max((busy for busy in further if self.factor(busy) <= known), default=self.most)

    def factor(self, busy: float) -> float:
        """Return by which factor a task takes longer with ``busy`` tasks at once than alone."""
        return 1 + self.waiting * (busy - 1) + self.crosstalk * busy * (busy - 1)


def contention_of(
    started: Floats, ended: Floats
) -> tuple[Contention | None, npt.NDArray[np.int64]]:
    """Return the contention of a recording (``None`` if there is none), and the concurrency at each task's start."""
    begun = np.searchsorted(np.sort(started), started, side="right")
    busy = begun - np.searchsorted(np.sort(ended), started, side="right")
    busy = np.maximum(busy, 1)
    held = ended - started
    best, error = None, float(held.var()) * len(held)
    columns = (busy - 1.0, busy * (busy - 1.0))
    for chosen in ((0, 1), (0,), (1,)):
        terms = np.column_stack([np.ones(len(held)), *(columns[index] for index in chosen)])
        fitted, *_ = np.linalg.lstsq(terms, held, rcond=None)
        left = float(((held - terms @ fitted) ** 2).sum())
        # The square root of this ratio is the number of standard errors of a single coefficient.
        gain = (error - left) / max(left / len(held), 1e-300)
        if fitted.min() > 0 and gain > _SIGNIFICANT**2 * len(chosen):
            growth = dict(zip(chosen, fitted[1:] / fitted[0], strict=True))
            best, error = Contention(growth.get(0, 0.0), growth.get(1, 0.0), int(busy.max())), left
    return best, busy


def drift_of(arrived: Floats, held: Floats) -> str | None:
    """Return how the second half of a recording differs from the first one, if chance does not explain it."""
    count = math.isqrt(len(arrived)) // 2 * 2
    edges = np.linspace(arrived[0], arrived[-1], count + 1)[1:-1]
    place = np.searchsorted(edges, arrived, side="right")
    tasks = np.bincount(place, minlength=count)
    work = np.bincount(place, weights=held, minlength=count)
    length = float(arrived[-1] - arrived[0]) / count
    for name, values in (
        ("arrival rate", tasks / length),
        ("running time", work[tasks > 0] / tasks[tasks > 0]),
    ):
        first, second = np.array_split(values, 2)
        before, after = float(first.mean()), float(second.mean())
        error = _error_of(first) + _error_of(second)
        if abs(after - before) > max(_SIGNIFICANT * math.sqrt(error), _DRIFT * min(before, after)):
            return f"the {name} drifts: mean of the first half {before:.3g}, of the second half {after:.3g}"
    return None


def _error_of(values: Floats) -> float:
    """Return the squared standard error of the mean. Neighbouring values may be correlated."""
    # Remove the trend within these values; what remains is due to chance.
    places = np.arange(len(values))
    around = values - np.polyval(np.polyfit(places, values, 1), places)
    lags = math.isqrt(len(values))
    spread = float(around @ around)
    together = sum(float(around[lag:] @ around[:-lag]) for lag in range(1, lags + 1))
    return max(spread + 2 * together, spread) / max(1, len(values)) ** 2


def relaxation(arrived: Floats, held: Floats, slots: int) -> float:
    """Return the relaxation time with a number of slots, by the diffusion approximation; infinite with too few slots.

    The variation of the arrivals includes that of the counts per window, so that bursts longer than the time between
    two arrivals count.
    """
    count, mean = len(arrived), float(held.mean())
    span = float(arrived[-1] - arrived[0])
    rate = (count - 1) / span
    spare = slots - rate * mean
    if spare <= 0:
        return math.inf
    number = math.isqrt(count)
    tasks, _ = np.histogram(arrived, number)
    bursts = float(tasks.var() / tasks.mean())
    variation = max(scv(np.diff(arrived)), bursts) + scv(held)
    return 2 * rate * variation * (mean / spare) ** 2


class Blocks:
    """The blocks of a recording for one number of slots, and resamples of them, always the same ones."""

    def __init__(self, arrived: Floats, held: Floats, slots: int) -> None:
        span = float(arrived[-1] - arrived[0])
        least = max(_RELAXED * relaxation(arrived, held, slots), float(held.mean()))
        self.enough = least * _BLOCKS <= span
        """whether the recording has enough blocks for a bound"""
        if not self.enough:
            return
        number = min(int(span // least) if least else len(arrived), math.isqrt(len(arrived)))
        edges = np.linspace(arrived[0], arrived[-1], number + 1)[1:-1]
        self._number = number
        self._place = np.searchsorted(edges, arrived, side="right")
        self._drawn = np.random.default_rng(len(arrived)).integers(0, number, (RESAMPLES, number))

    def share_above(self, waits: Floats, limit: float) -> float:
        """Return an upper bound of the share of waits above a limit."""
        tasks = np.bincount(self._place, minlength=self._number)
        above = np.bincount(self._place, weights=waits > limit, minlength=self._number)
        shares = above[self._drawn].sum(axis=1) / np.maximum(tasks[self._drawn].sum(axis=1), 1)
        return float(np.quantile(shares, _CONFIDENCE))

    def range_of(self, waits: Floats, quantile: float) -> tuple[float, float]:
        """Return the range in which a quantile of the waits is, apart from chance."""
        order = np.argsort(waits, kind="stable")
        weights = np.stack([np.bincount(drawn, minlength=self._number) for drawn in self._drawn])
        found = []
        for weight in weights:
            total = np.cumsum(weight[self._place[order]])
            index = int(np.searchsorted(total, quantile * total[-1]))
            found.append(float(waits[order[min(index, len(order) - 1)]]))
        low, high = np.quantile(found, (1 - _CONFIDENCE, _CONFIDENCE))
        return float(low), float(high)
