"""The steps of each task in their order, each with the one before it: what the audit and the rules look at."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from taskqueue_spark.pipeline.gaps import Holes, spans
from taskqueue_spark.pipeline.switches import switches

__all__ = ["ENDED", "OVER", "TASK", "code_of", "name_of", "of_task", "steps"]

OVER = ("done", "expired", "cancelled", "discarded")
"""states after which an id may come again"""
ENDED = (*OVER, "dead")
TASK = ("run", "key", "task_id")
_CARRIED = ("event", "state", "ts", "attempt", "losses", "due_at", "worker")
_NO_TASK = ("configured", "damaged", "missing")


def steps(transitions: DataFrame) -> DataFrame:
    """Return the transitions of tasks, each once, with more columns.

    ``before_seq`` and others: of the transition of the same task before, within the run; null where there is none.
    ``next_seq``: of the one after. ``begins``: a life begins here. ``life``: counts lives within the run, from 1.
    ``began``, ``over`` and ``holes`` of its run and shard (see `gaps`), ``holes`` with the times at which the queue was
    not noted. ``hidden``: something that is missing lies between the one before (or number 1) and this one.

    A key lives in one shard of a run, so within both the number is the order. Rows are spread by key and id.
    """
    rows = (
        transitions.where((F.col("task_id") != "") & ~F.col("event").isin(*_NO_TASK))
        .repartition("key", "task_id")
        .withColumn("task_hash", F.xxhash64(*TASK))
        .withColumn("before_seq", F.lag("seq").over(of_task()))
        .where(F.col("before_seq").isNull() | (F.col("before_seq") != F.col("seq")))
    )
    order = of_task()
    for name in _CARRIED:
        rows = rows.withColumn(f"before_{name}", F.lag(name).over(order))
    again = (F.col("event") == "retried") & F.coalesce(
        F.col("before_state").isin(*OVER), F.expr("false")
    )
    rows = (
        rows.withColumn("next_seq", F.lead("seq").over(order))
        .withColumn("begins", (F.col("event") == "published") | again)
        .withColumn(
            "life",
            F.sum(F.when(F.col("begins") | F.col("before_seq").isNull(), 1).otherwise(0))
            .over(order.rowsBetween(Window.unboundedPreceding, 0)),
        )
    )  # fmt: skip
    rows = rows.join(F.broadcast(spans(transitions)), ["run", "shard"], "left")
    rows = rows.join(F.broadcast(switches(transitions)), ["run", "key"], "left")
    return (
        rows.withColumn("holes", F.coalesce(F.concat("holes", "dark"), "holes", "dark"))
        .drop("dark")
        .withColumn("hidden", Holes.between(F.col("before_seq"), F.col("seq")))
    )


def of_task() -> WindowSpec:
    """Return the window of a task's steps within a run, in their order."""
    return Window.partitionBy("task_hash", *TASK).orderBy(
        "seq"
    )  # numbers are sorted faster than names


def code_of(column: str, names: tuple[str, ...]) -> Column:
    """Return the place of a name among some, from 1; 0 for another. Numbers are aggregated faster than names."""
    return F.array_position(F.array(*map(F.lit, names)), F.col(column)).cast("int")


def name_of(code: Column, names: tuple[str, ...]) -> Column:
    """Return the name at a place; null for none."""
    return F.when(code > 0, F.element_at(F.array(*map(F.lit, names)), code))
