"""Latency: how long tasks waited, how long they ran, and how long they took from publish to end."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.durations import MICROSECONDS, seconds_of, steps

DURATIONS = {"queue_wait": "queue_wait", "run": "run_time", "end_to_end": "end_to_end"}
"""names of the durations, and their columns in the result of `steps`"""
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
_ACCURACY = 10_000
"""accuracy of a percentile: its rank is exact to 1/10,000 of the number of values"""
_SPLIT = {"priority": "tinyint", "tenant": "string"}


def latency(
    transitions: DataFrame,
    window: str | None = "1 minute",
    *,
    by: Collection[str] = tuple(_SPLIT),
) -> DataFrame:
    """Return percentiles of durations by key, priority, tenant and window. The end of a duration decides its window.

    ``window``: length of the windows, such as "1 minute" or "1 hour"; ``None``: no windows. ``by``: which of priority
    and tenant to split by; a column not in ``by`` is null. The section "Tables" of docs/pipeline.md describes the
    columns. Raises `InvalidInput` for an invalid window or split.
    """
    seconds = None if window is None else seconds_of(window)
    if not set(by) <= _SPLIT.keys():
        raise InvalidInput("by", kind_of(by), f"any of {', '.join(_SPLIT)}")
    start = (
        "cast(null as timestamp)" if seconds is None else f"window(ts, '{seconds} seconds').start"
    )
    rows = steps(transitions).selectExpr(
        "key",
        *(
            name if name in by else f"cast(null as {kind}) as {name}"
            for name, kind in _SPLIT.items()
        ),
        f"{start} as window_start",
        "first_end",
        *DURATIONS.values(),
    )
    measured = "first_end or queue_wait is not null or run_time is not null"
    shares = ", ".join(map(str, PERCENTILES.values()))
    totals = {
        "tasks": "count_if(first_end)",
        "deliveries": "count(queue_wait)",
        "executions": "count(run_time)",
        **{
            name: f"percentile_approx({column}, array({shares}), {_ACCURACY})"
            for name, column in DURATIONS.items()
        },
        **{f"{name}_max": f"max({column})" for name, column in DURATIONS.items()},
        "clamped": " + ".join(f"count_if({column} < 0)" for column in DURATIONS.values()),
    }
    groups = (
        rows.where(measured)
        .groupBy("key", *_SPLIT, "window_start")
        .agg(*(fn.expr(text).alias(name) for name, text in totals.items()))
    )
    values = {
        f"{name}_{figure}": f"{name}_max" if figure == "max" else f"{name}[{index}]"
        for name in DURATIONS
        for index, figure in enumerate((*PERCENTILES, "max"))
    }
    return groups.selectExpr(
        "key", *_SPLIT, "window_start", "tasks", "deliveries", "executions",
        *(f"if({value} < 0, 0, {value}) / {MICROSECONDS} as {name}" for name, value in values.items()),
        "clamped",
    )  # fmt: skip
