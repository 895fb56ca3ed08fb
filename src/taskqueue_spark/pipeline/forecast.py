"""The forecast for one key: recorded arrivals, replayed with different numbers of slots. Uses Python and NumPy only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from taskqueue_spark.pipeline.queueing import (
    Floats,
    bucket,
    least,
    replay,
    resampled,
    scv,
    wait_quantile,
)

_RESAMPLES = 10
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
    no number of slots meets the target, ``unreachable`` gives the reason.

    The number of slots must exceed the load, so that the slots can process the arrivals. If all arrivals are within
    the target wait plus the mean running time, they are a single burst, and how often bursts come is unknown. The
    recommendation is then for that burst, and ``arrival_rate`` is the average until the last task of the burst ends.
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

    def waits(slots: int) -> Floats:
        return replay(arrived, held, slots, overhead=overhead, priorities=priorities)

    def fits(slots: int) -> bool:
        return float(np.quantile(waits(slots), percentile)) <= target_wait

    recorded = flow(started - arrived)
    at_least = 1 if burst else math.floor(recorded["load"]) + 1
    if overhead > target_wait or (slots := least(fits, at_least, max(count, observed))) is None:
        why = f"a task waits {overhead:.3g} s even if a slot is free"
        return {**matches, **recorded, "unreachable": why}
    expected = waits(slots)
    rate, load = (fields := flow(expected))["arrival_rate"], fields["load"]
    again = [
        float(np.quantile(replay(*other, slots, overhead=overhead), percentile))
        for other in resampled(arrived, held, _RESAMPLES, seed=count)
    ]
    formula = math.inf
    if not burst:
        held_for = mean + overhead
        formula = wait_quantile(percentile, slots=slots, rate=rate, mean=held_for, **variation)
    rate_limit = slots / max(mean + overhead, _TICK)
    tokens = bucket(arrived + expected, rate_limit)
    interval = max(1, math.ceil(tokens / rate_limit))
    wait = float(np.quantile(expected, percentile))
    each = matches["slots_per_worker"]
    return {
        **matches,
        **fields,
        "slots": slots,
        "max_inflight": slots,
        "utilisation": load / slots,
        "peak_utilisation": max(rate, peak_rate) * mean / slots,
        "expected_wait": wait,
        "expected_low": min(wait, *again),
        "expected_high": max(wait, *again),
        "formula_wait": formula + overhead if math.isfinite(formula) else None,
        "backlog": _backlog(arrived, expected),
        "rate_limit": rate_limit,
        "burst": tokens,
        "max_tokens": math.ceil(rate_limit * interval),
        "interval": interval,
        "workers": math.ceil(slots / each) if each else None,
    }


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
