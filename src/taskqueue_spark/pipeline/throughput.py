"""Throughput and concurrency: how often each event happened, and how many executions ran at once."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as fn

from taskqueue_core.authoring.entries import POISONED
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.columns import TASK_EVENTS
from taskqueue_spark.pipeline.durations import (
    MICROSECONDS,
    executions,
    run_ends,
    seconds_of,
)

_GROUPS = {"key": ("key",), "worker": ("key", "worker")}


def throughput(transitions: DataFrame, window: str | None = "1 minute") -> DataFrame:
    """Return how often each event happened, and how often per second, for each key and window.

    ``window``: length of the windows, such as "1 minute"; ``None``: no windows. The section "Tables" of
    docs/pipeline.md describes the columns. Rows of the journal that were read twice count twice, because they are not
    grouped by task. Raises `InvalidInput` for an invalid window.
    """
    length = None if window is None else seconds_of(window)
    rows = transitions.where("task_id != ''").select("key", "ts", "event", "reason")
    if length is None:
        counted = rows.groupBy("key").agg(
            *_counts(), fn.expr("unix_micros(max(ts)) - unix_micros(min(ts)) as span")
        )
        start, seconds = fn.lit(None).cast("timestamp"), fn.col("span") / MICROSECONDS
    else:
        counted = rows.groupBy("key", fn.window("ts", f"{length} seconds")).agg(*_counts())
        start, seconds = fn.col("window.start"), fn.lit(float(length))
    names = (*TASK_EVENTS, "poisoned")
    rates = [fn.try_divide(fn.col(name), seconds).alias(f"{name}_per_second") for name in names]
    return counted.select(
        "key", start.alias("window_start"), seconds.alias("seconds"), *names, *rates
    )


def concurrency(transitions: DataFrame, by: str = "key", *, step: str = "1 minute") -> DataFrame:
    """Return how many executions ran at once. The section "Tables" of docs/pipeline.md describes the columns.

    ``by``: "key", or "worker" for each worker of each key; with "key", the column worker is null. Rows are sorted by
    time only within a ``step``; a smaller step spreads a busy key over more cores. Raises `InvalidInput`.
    """
    if by not in _GROUPS:
        raise InvalidInput("by", kind_of(by), "key or worker")
    length, group = seconds_of(step) * MICROSECONDS, [*_GROUPS[by]]
    work = executions(transitions).join(fn.broadcast(run_ends(transitions)), "run", "left")
    start = "unix_micros(ts)"
    end = f"greatest({start}, unix_micros(coalesce(until, heard_at)))"
    changes = (
        f"inline(array(struct({start} as at, 1 as change), struct({end} as at, -1 as change)))"
    )
    edges = work.selectExpr(*group, changes).selectExpr("*", f"floor(at / {length}) as step")
    held = (
        _levels(edges, group)
        .groupBy(*group, "level")
        .agg(
            fn.expr("sum(length) as length"), fn.expr("sum(begun) as begun"), fn.expr("min(at) as since"),
            fn.expr("max(at) as until"),
        )
    )  # fmt: skip
    whole = f"partition by {', '.join(group)}"
    shares = held.selectExpr(
        "*",
        f"sum(length) over ({whole} order by level rows unbounded preceding) as upto",
        f"sum(length) over ({whole}) as all",
    )
    totals = {
        "executions": "sum(begun)",
        "peak": "max(level)",
        "mean": "try_divide(sum(level * length), sum(length))",
        "p99": "min(level) filter (where upto >= 0.99D * all and all > 0)",
        "since": "timestamp_micros(min(since))",
        "until": "timestamp_micros(max(until))",
    }
    worker = fn.col("worker") if by == "worker" else fn.lit(None).cast("string")
    return (
        shares.groupBy(*group)
        .agg(*(fn.expr(text).alias(name) for name, text in totals.items()))
        .select("key", worker.alias("worker"), *totals)
    )


def _levels(edges: DataFrame, group: list[str]) -> DataFrame:
    """Return, for each start or end of an execution, how many executions ran from then until the next start or end."""
    names = ", ".join(group)
    in_turn = f"partition by {names} order by step"
    cells = (
        edges.groupBy(*group, "step")
        .agg(fn.sum("change").alias("net"), fn.min("at").alias("first"))
        .selectExpr(
            *group,
            "step",
            f"sum(net) over ({in_turn} rows unbounded preceding) - net as base",
            f"lead(first) over ({in_turn}) as next_first",
        )
    )
    in_time = f"partition by {names}, step order by at"
    rows = edges.selectExpr(
        "*",
        # A window of type "range" counts all changes in the same microsecond together.
        f"sum(change) over ({in_time} range unbounded preceding) as here",
        f"lead(at) over ({in_time}) as next_at",
    )
    # Compare with <=>, because a worker may be null.
    same = " and ".join(f"a.{name} <=> b.{name}" for name in (*group, "step"))
    return (
        rows.alias("a")
        .join(cells.alias("b"), fn.expr(same))
        .selectExpr(
            *(f"a.{name}" for name in group),
            "at",
            "base + here as level",
            "coalesce(next_at, next_first, at) - at as length",
            "if(change = 1, 1, 0) as begun",
        )
    )


def _counts() -> list[Column]:
    event = fn.col("event")
    poisoned = (event == "dead_lettered") & (fn.col("reason") == POISONED)
    counts = [fn.count_if(event == name).alias(name) for name in TASK_EVENTS]
    return [*counts, fn.count_if(poisoned).alias("poisoned")]
