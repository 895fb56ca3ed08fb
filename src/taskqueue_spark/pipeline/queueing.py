"""Waiting times with a given number of slots: formulas, and a replay of recorded arrivals. Uses Python and NumPy only.

Times are in seconds, rates per second. A *slot* is one unit of concurrency, which ``max_inflight`` counts. ``held`` is
the time for which a task occupies its slot, and ``overhead`` the time until a free slot is given to a task. ``scv`` is
a squared coefficient of variation: 0 for constant intervals, 1 for a Poisson process or exponential times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def erlang_c(slots: int, load: float) -> float:
    """Return the probability that a task has to wait (M/M/c). ``load``: arrival rate times mean ``held`` time."""
    if load <= 0:
        return 0.0
    if load >= slots:
        return 1.0
    # Compute the inverse of the Erlang B formula by recursion, which is numerically stable.
    inverse = 1.0
    for number in range(1, slots + 1):
        inverse = 1.0 + inverse * number / load
    blocked = 1.0 / inverse
    busy = load / slots
    return blocked / (1.0 - busy + busy * blocked)


def wait_quantile(
    quantile: float, *, slots: int, rate: float, mean: float, arrival_scv: float, held_scv: float
) -> float:
    """Return a quantile of the wait by Allen and Cunneen's approximation of G/G/c; infinite with too few slots.

    The tail is assumed to be exponential, as with M/M/c, and its mean is scaled by the variation of arrivals and
    running times. The result is accurate for moderate variation, and a third or more too high for widely varying
    times.
    """
    load = rate * mean
    if load >= slots:
        return math.inf
    waiting = erlang_c(slots, load)
    if waiting <= 1.0 - quantile:
        return 0.0
    stretch = (arrival_scv + held_scv) / 2.0
    return math.log(waiting / (1.0 - quantile)) * stretch * mean / (slots - load)


def scv(values: Floats) -> float:
    """Return the squared coefficient of variation; 0 if the mean is 0."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.var()) / mean**2 if mean > 0 else 0.0


def replay(
    arrived: Floats,
    held: Floats,
    slots: int,
    *,
    overhead: float = 0.0,
    priorities: npt.NDArray[np.int64] | None = None,
    slowdown: Callable[[int], float] | None = None,
) -> Floats:
    """Return how long each recorded task would wait for its delivery with this number of slots.

    ``arrived`` is sorted. Tasks are served by priority, the largest number first, and then in the order of arrival; a
    running task is not interrupted. ``slowdown``: the factor by which ``held`` grows if this number of tasks runs when
    a task starts. Takes O(n log n).
    """
    if slowdown is not None or (priorities is not None and len(np.unique(priorities)) > 1):
        ranks = [0] * len(arrived) if priorities is None else priorities.tolist()
        factors = [slowdown(busy) if slowdown else 1.0 for busy in range(1, slots + 1)]
        return _in_order(arrived.tolist(), held.tolist(), factors, overhead, ranks)
    free = [-math.inf] * slots
    take = heapq.heapreplace
    waits = []
    for arrival, time in zip(arrived.tolist(), held.tolist(), strict=True):
        freed = free[0]
        start = (freed if freed > arrival else arrival) + overhead  # noqa: FURB136 - calling `max` would take twice as long
        take(free, start + time)
        waits.append(start - arrival)
    return np.array(waits)


def _in_order(
    arrived: Sequence[float],
    held: Sequence[float],
    factors: Sequence[float],
    overhead: float,
    priorities: Sequence[int],
) -> Floats:
    """Replay tasks by priority. ``factors[n]``: how much longer a task takes if it starts while n slots are busy."""
    slots = len(factors)
    running: list[float] = []
    waiting: list[tuple[int, int]] = []
    waits = [0.0] * len(arrived)
    clock = -math.inf

    def serve(until: float) -> None:
        nonlocal clock
        while waiting and (len(running) < slots or running[0] <= until):
            clock = max(clock, heapq.heappop(running)) if len(running) == slots else clock
            _, index = heapq.heappop(waiting)
            clock = max(clock, arrived[index])
            while running and running[0] <= clock:
                heapq.heappop(running)
            start = clock + overhead
            heapq.heappush(running, start + held[index] * factors[len(running)])
            waits[index] = start - arrived[index]

    for index, arrival in enumerate(arrived):
        serve(arrival)
        heapq.heappush(waiting, (-priorities[index], index))
    serve(math.inf)
    return np.array(waits)


def least(fits: Callable[[int], bool], at_least: int, at_most: int) -> int | None:
    """Return the smallest number from ``at_least`` to ``at_most`` that fits; ``None`` if even ``at_most`` does not fit.

    If a number fits, all larger ones must fit too.
    """
    low, step = at_least, 1
    high = min(low, at_most)
    while not fits(high):
        # Start with small steps, because the result is usually near the start.
        if high >= at_most:
            return None
        low, high, step = high + 1, min(high + step, at_most), step * 2
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return high


def bucket(started: Floats, rate: float) -> int:
    """Return the smallest size of a token bucket that is refilled at ``rate`` per second and delays no delivery."""
    times = np.sort(started)
    spent = np.arange(1, len(times) + 1) - rate * times
    before = np.minimum.accumulate(spent - 1.0)
    return math.ceil(round(float(np.max(spent - before)), 6)) if len(times) else 1
