"""How much happened, and how much at once."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from taskqueue_core.authoring.entries import POISONED
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.columns import TASK_EVENTS
from taskqueue_spark.pipeline.durations import (
    MICROSECONDS,
    executions,
    micros,
    run_ends,
    seconds_of,
)

_GROUPS = {"key": ("key",), "worker": ("key", "worker")}


def throughput(transitions: DataFrame, window: str | None = "1 minute") -> DataFrame:
    """Return how often each event happened, per key and window of time.

    ``window``: its length, as "1 minute"; ``None``: all at once. A row has key, window_start and seconds (the
    length of the window; without windows null and the time from the key's first event to its last), a count
    per event by its name, and ``poisoned``, those of the dead_lettered who were lost too often: losses are
    ``lost + poisoned``. Then each count per second, as ``acked_per_second``; null where there are no seconds.
    Windows in which nothing happened have no row. A row of the journal that was read twice counts twice here:
    nothing is brought together by task. What was refused at the door never was a task's transition, so the
    journal does not have it.

    Raises `InvalidInput` for a window that cannot be.
    """
    length = None if window is None else seconds_of(window)
    rows = _of_tasks(transitions)
    if length is None:
        counted = rows.groupBy("key").agg(
            *_counts(), (micros(fn.max("ts")) - micros(fn.min("ts"))).alias("span")
        )
        start, seconds = fn.lit(None).cast("timestamp"), fn.col("span") / MICROSECONDS
    else:
        counted = rows.groupBy("key", fn.window("ts", f"{length} seconds")).agg(*_counts())
        start, seconds = fn.col("window.start"), fn.lit(float(length))
    return counted.select(
        "key", start.alias("window_start"), seconds.alias("seconds"), *_output_columns(seconds)
    )


def concurrency(transitions: DataFrame, by: str = "key", *, step: str = "1 minute") -> DataFrame:
    """Return how many executions there were at once: key, worker, executions, peak, mean, p99, since, until.

    ``by``: "key", or "worker" for each worker of each key; else worker is null. From the first delivery
    (since) to the last end (until), by time: ``peak`` is the most there ever were, ``mean`` their average,
    ``p99`` the least number that was not exceeded in 99 % of the time; mean and p99 are null where that is no
    time at all. An execution of which the journal has no end lasts to the task's next event, or else to the
    last one of the run. What ends in the microsecond in which another begins was not there with it.

    The order in time is only made within a ``step``; a smaller one spreads a busy key over more cores. Raises
    `InvalidInput`.
    """
    if by not in _GROUPS:
        raise InvalidInput("by", kind_of(by), "key or worker")
    length, group = seconds_of(step) * MICROSECONDS, [*_GROUPS[by]]
    work = executions(transitions).join(fn.broadcast(run_ends(transitions)), "run", "left")
    start = micros("ts")
    end = fn.greatest(start, micros(fn.coalesce("until", "heard_at")))
    edges = work.select(
        *group,
        fn.inline(
            fn.array(
                fn.struct(start.alias("at"), fn.lit(1).alias("change")),
                fn.struct(end.alias("at"), fn.lit(-1).alias("change")),
            )
        ),
    ).withColumn("step", fn.floor(fn.col("at") / length))
    held = (
        _levels(edges, group)
        .groupBy(*group, "level")
        .agg(
            fn.sum("length").alias("length"),
            fn.sum("begun").alias("begun"),
            fn.min("at").alias("since"),
            fn.max("at").alias("until"),
        )
    )
    rising = Window.partitionBy(*group).orderBy("level")
    whole = Window.partitionBy(*group)
    shares = held.withColumns(
        {
            "upto": fn.sum("length").over(rising.rowsBetween(Window.unboundedPreceding, 0)),
            "all": fn.sum("length").over(whole),
        }
    )
    worker = fn.col("worker") if by == "worker" else fn.lit(None).cast("string")
    return (
        shares.groupBy(*group)
        .agg(
            fn.sum("begun").alias("executions"),
            fn.max("level").alias("peak"),
            fn.try_divide(fn.sum(fn.col("level") * fn.col("length")), fn.sum("length")).alias(
                "mean"
            ),
            fn.min(
                fn.when(
                    (fn.col("upto") >= 0.99 * fn.col("all")) & (fn.col("all") > 0), fn.col("level")
                )
            ).alias("p99"),
            fn.timestamp_micros(fn.min("since")).alias("since"),
            fn.timestamp_micros(fn.max("until")).alias("until"),
        )
        .select(
            "key", worker.alias("worker"), "executions", "peak", "mean", "p99", "since", "until"
        )
    )


def _levels(edges: DataFrame, group: list[str]) -> DataFrame:
    """Return for each change how many there were after it, and how long it stayed so."""
    cells = edges.groupBy(*group, "step").agg(
        fn.sum("change").alias("net"), fn.min("at").alias("first")
    )
    in_turn = Window.partitionBy(*group).orderBy("step")
    cells = cells.select(
        *group,
        "step",
        (
            fn.sum("net").over(in_turn.rowsBetween(Window.unboundedPreceding, 0)) - fn.col("net")
        ).alias("base"),
        fn.lead("first").over(in_turn).alias("next_first"),
    )
    in_time = Window.partitionBy(*group, "step").orderBy("at")
    rows = edges.withColumns(
        {
            # By range, so that what happens in the same microsecond has happened together.
            "here": fn.sum("change").over(in_time.rangeBetween(Window.unboundedPreceding, 0)),
            "next_at": fn.lead("at").over(in_time),
        }
    )
    same = fn.lit(col=True)
    for name in (*group, "step"):  # a worker may be null
        same &= fn.col(f"a.{name}").eqNullSafe(fn.col(f"b.{name}"))
    result = rows.alias("a").join(cells.alias("b"), same)
    return result.select(
        *(fn.col(f"a.{name}").alias(name) for name in group),
        "at",
        (fn.col("base") + fn.col("here")).alias("level"),
        (fn.coalesce("next_at", "next_first", "at") - fn.col("at")).alias("length"),
        fn.when(fn.col("change") == 1, 1).otherwise(0).alias("begun"),
    )


def _of_tasks(transitions: DataFrame) -> DataFrame:
    return transitions.where(fn.col("task_id") != "").select("key", "ts", "event", "reason")


def _counts() -> list[Column]:
    event = fn.col("event")
    poisoned = (event == "dead_lettered") & (fn.col("reason") == POISONED)
    counts = [fn.count_if(event == name).alias(name) for name in TASK_EVENTS]
    return [*counts, fn.count_if(poisoned).alias("poisoned")]


def _output_columns(seconds: Column) -> list[Column]:
    names = (*TASK_EVENTS, "poisoned")
    rates = [fn.try_divide(fn.col(name), seconds).alias(f"{name}_per_second") for name in names]
    return [*map(fn.col, names), *rates]
