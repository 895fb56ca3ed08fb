"""Where the time goes: waiting, running, and from beginning to end."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.durations import MICROSECONDS, seconds_of, steps

DURATIONS = {"queue_wait": "queue_wait", "run": "run_time", "end_to_end": "end_to_end"}
"""what is measured, and the column of `steps` that has it"""
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
_ACCURACY = 10_000
"""a percentile's rank is off by a ten-thousandth of the number of values at most; by none where they are few"""
_SPLIT = ("priority", "tenant")


def latency(
    transitions: DataFrame,
    window: str | None = "1 minute",
    *,
    by: Collection[str] = _SPLIT,
) -> DataFrame:
    """Return how long things took, per key, priority, tenant and window of the time at which they were over.

    ``window``: its length, as "1 minute" or "1 hour"; ``None``: all at once. ``by``: which of priority and
    tenant are told apart; the column of another one is null. A task without a tenant has null as well.

    A row has key, priority, tenant, window_start (null without windows), then

    - ``tasks``, whose first end is in the window, ``deliveries`` whose wait is known, and ``executions`` that
      ended in a verdict;
    - of ``queue_wait``, ``run`` and ``end_to_end`` (as `durations.steps` defines them) the p50, p95, p99 and the
      maximum, in seconds: ``queue_wait_p50``, …, ``end_to_end_max``; null where nothing was measured. A
      percentile is a value that was measured, the first with so many at or below it, and its rank is exact to
      1/10,000 of their number;
    - ``clamped``: how many of these durations would have been negative, as a clock was set back, and count as
      0.

    Raises `InvalidInput` for a window or a split that there is not.
    """
    seconds = None if window is None else seconds_of(window)
    if not set(by) <= set(_SPLIT):
        raise InvalidInput("by", kind_of(by), f"any of {', '.join(_SPLIT)}")
    rows = steps(transitions).select(
        "key",
        *(
            _optional_column(name, name in by, kind)
            for name, kind in zip(_SPLIT, ("tinyint", "string"), strict=True)
        ),
        _window(seconds).alias("window_start"),
        "first_end",
        *DURATIONS.values(),
    )
    measured = [fn.col(name).isNotNull() for name in DURATIONS.values()]
    rows = rows.where(fn.col("first_end") | measured[0] | measured[1])
    groups = rows.groupBy("key", *_SPLIT, "window_start").agg(
        fn.count_if("first_end").alias("tasks"),
        fn.count("queue_wait").alias("deliveries"),
        fn.count("run_time").alias("executions"),
        *(_percentiles_of(column).alias(name) for name, column in DURATIONS.items()),
        *(fn.max(column).alias(f"{name}_max") for name, column in DURATIONS.items()),
        sum((fn.count_if(fn.col(name) < 0) for name in DURATIONS.values()), fn.lit(0)).alias(
            "clamped"
        ),
    )
    return groups.select(
        "key",
        *_SPLIT,
        "window_start",
        "tasks",
        "deliveries",
        "executions",
        *(figure for name in DURATIONS for figure in _spread(name)),
        "clamped",
    )


def _optional_column(name: str, retained: bool, kind: str) -> Column:  # noqa: FBT001 - private, and read in one place
    return fn.col(name) if retained else fn.lit(None).cast(kind).alias(name)


def _window(seconds: int | None) -> Column:
    if seconds is None:
        return fn.lit(None).cast("timestamp")
    return fn.window("ts", f"{seconds} seconds")["start"]


def _percentiles_of(column: str) -> Column:
    return fn.percentile_approx(column, [*PERCENTILES.values()], _ACCURACY)


def _spread(name: str) -> list[Column]:
    values = {figure: fn.col(name)[index] for index, figure in enumerate(PERCENTILES)}
    values["max"] = fn.col(f"{name}_max")
    return [
        (fn.when(value < 0, 0).otherwise(value) / MICROSECONDS).alias(f"{name}_{figure}")
        for figure, value in values.items()
    ]
