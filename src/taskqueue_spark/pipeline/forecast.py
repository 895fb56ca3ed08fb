"""The forecast for one key: recorded arrivals, replayed with different numbers of slots. Uses Python and NumPy only."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from taskqueue_spark.pipeline.queueing import (
    Floats,
    bucket,
    least,
    replay,
    scv,
    wait_quantile,
)
from taskqueue_spark.pipeline.recording import Blocks, Contention, contention_of, drift_of

_UNCERTAIN = 0.15
"""maximum relative difference between the slots that met the target in the recording, and those that surely meet it"""
_TICK = 1e-6
"""resolution of the times in a journal, in seconds"""


def advise(
    *,
    arrived: Floats,
    started: Floats,
    ended: Floats,
    priorities: npt.NDArray[np.int64] | None = None,
    workers: npt.NDArray[np.int64] | None = None,
    peak_rate: float = 0.0,
    target_wait: float,
    percentile: float = 0.95,
) -> dict[str, Any]:
    """Return the columns of `capacity.advice` for one key, from the times when tasks became available, began and ended.

    Each array has one value per task, for at least 2 tasks, which are sorted by ``arrived``. Times are in seconds. If
    there is no recommendation, ``unreachable`` gives the reason.

    The recommendation is the least number of slots for which even an upper bound of the share of tasks that wait too
    long is low enough; the bound is that of resamples of the recording. The number of slots must exceed the load, so
    that the slots can process the arrivals. If all arrivals are within the target wait plus the mean running time, they
    are a single burst, and how often bursts come is unknown. The recommendation is then for that burst, without a
    bound, and ``arrival_rate`` is the average until the last task of the burst ends.

    If running times grew with the number of tasks that ran at once, the replay computes them for its own concurrency.
    """
    held = np.maximum(ended - started, 0.0)
    count, mean = len(arrived), float(held.mean())
    span = float(arrived[-1] - arrived[0])
    burst = span < target_wait + mean
    overhead, observed = _overhead(arrived, started, ended)
    variation = {"arrival_scv": scv(np.diff(arrived)), "held_scv": scv(held)}
    matches = {
        "sampled": count, "arrival_scv": variation["arrival_scv"], "service_mean": mean,
        "service_scv": variation["held_scv"], "overhead": overhead, **_of_workers(started, ended, workers),
    }  # fmt: skip

    def flow(waits: Floats) -> dict[str, float]:
        until = float(np.max(arrived + waits + held) - arrived[0])
        rate = count / max(until, _TICK) if burst else (count - 1) / span
        return {"arrival_rate": rate, "load": rate * mean}

    contention, busy = contention_of(started, ended)
    factor = contention.factor if contention else None
    alone = held / np.vectorize(factor)(busy) if factor else held

    @cache
    def waits(slots: int) -> Floats:
        return replay(
            arrived, alone, slots, overhead=overhead, priorities=priorities, slowdown=factor
        )

    def meets(slots: int) -> bool:
        return float(np.quantile(waits(slots), percentile)) <= target_wait

    def fits(slots: int) -> bool:
        if burst:
            return meets(slots)
        blocks = Blocks(arrived, alone * factor(slots) if factor else alone, slots)
        return blocks.enough and blocks.share_above(waits(slots), target_wait) <= 1 - percentile

    recorded = flow(started - arrived)
    load = recorded["load"] * float(alone.mean()) / max(mean, _TICK)
    at_least = 1 if burst else math.floor(load) + 1
    at_most = contention.reach if contention else max(count, observed)
    why = None if burst else drift_of(arrived, alone)
    if overhead > target_wait:
        why = f"a task waits {overhead:.3g} s even if a slot is free"
    fewest = None if why else least(meets, at_least, at_most)
    slots = fewest and least(fits, fewest, at_most)
    if fewest is None or slots is None or slots - fewest > max(1, _UNCERTAIN * fewest):
        return {**matches, **recorded, "unreachable": why or _refusal(contention, fewest, slots)}
    expected = waits(slots)
    rate, load = (fields := flow(expected))["arrival_rate"], fields["load"]
    wait = float(np.quantile(expected, percentile))
    low = high = wait
    if not burst:
        blocks = Blocks(arrived, alone * factor(slots) if factor else alone, slots)
        low, high = blocks.range_of(expected, percentile)
    formula = math.inf
    if not burst:
        held_for = mean + overhead
        formula = wait_quantile(percentile, slots=slots, rate=rate, mean=held_for, **variation)
    rate_limit = slots / max(mean + overhead, _TICK)
    tokens = bucket(arrived + expected, rate_limit)
    interval = max(1, math.ceil(tokens / rate_limit))
    each = matches["slots_per_worker"]
    return {
        **matches,
        **fields,
        "slots": slots,
        "max_inflight": slots,
        "utilisation": load / slots,
        "peak_utilisation": max(rate, peak_rate) * mean / slots,
        "expected_wait": wait,
        "expected_low": min(wait, low),
        "expected_high": max(wait, high),
        "formula_wait": formula + overhead if math.isfinite(formula) else None,
        "backlog": _backlog(arrived, expected),
        "rate_limit": rate_limit,
        "burst": tokens,
        "max_tokens": math.ceil(rate_limit * interval),
        "interval": interval,
        "workers": math.ceil(slots / each) if each else None,
    }


def _refusal(contention: Contention | None, fewest: int | None, slots: int | None) -> str:
    """Return why there is no recommendation, although a task does not wait too long if a slot is free.

    ``fewest``: the least number of slots that met the target in the recording; ``slots``: that of the upper bound.
    """
    if fewest is None and contention:
        return (
            "running times grow with the number of tasks at once, and up to the highest number recorded "
            f"({contention.most}) the target is not met"
        )
    bound = "more than were recorded" if slots is None else str(slots)
    return (
        f"the recording is too short for its variation: slots that meet the target in it: {fewest}; "
        f"slots that meet it with certainty: {bound}"
    )


def _overhead(arrived: Floats, started: Floats, ended: Floats) -> tuple[float, int]:
    """Return the median wait of tasks that found a free slot and no waiting task, and the peak number of busy slots."""
    begun = np.searchsorted(np.sort(started), arrived, side="right")
    over = np.searchsorted(np.sort(ended), arrived, side="right")
    busy = begun - over
    observed = _most_at_once(started, ended)
    alone = (np.arange(len(arrived)) - begun <= 0) & (busy < observed)
    return (float(np.median((started - arrived)[alone])) if alone.any() else 0.0), observed


def _most_at_once(started: Floats, ended: Floats) -> int:
    # Put ends first, because an end frees its slot for a start at the same time.
    times = np.concatenate([ended, started])
    steps = np.repeat([-1, 1], len(started))
    return int(np.cumsum(steps[np.argsort(times, kind="stable")]).max(initial=0))


def _of_workers(
    started: Floats, ended: Floats, workers: npt.NDArray[np.int64] | None
) -> dict[str, int | None]:
    names = np.unique(workers[workers >= 0]) if workers is not None else np.array([])
    most = [_most_at_once(started[workers == name], ended[workers == name]) for name in names]
    return {"slots_per_worker": max(most, default=None), "workers_seen": len(names)}


def _backlog(arrived: Floats, waits: Floats) -> int:
    begun = np.searchsorted(np.sort(arrived + waits), arrived, side="left")
    return int(np.max(np.arange(1, len(arrived) + 1) - begun))
