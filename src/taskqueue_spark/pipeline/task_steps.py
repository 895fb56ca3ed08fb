"""The steps of each task in their order, each with the one before it: what the audit and the rules look at."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from taskqueue_spark.pipeline.gaps import Holes, spans
from taskqueue_spark.pipeline.settings_history import switches

OVER = ("done", "expired", "cancelled", "discarded")
"""states after which an id may come again"""
ENDED = (*OVER, "dead")
TASK = ("run", "key", "task_id")
OF_TASK = "partition by task_hash, run, key, task_id order by seq"
"""the window of a task's steps within a run, in their order: numbers are sorted faster than names"""


def name_list(names: tuple[str, ...]) -> str:
    """Return names as a list within an expression."""
    return ", ".join(f"'{name}'" for name in names)


_BEFORE = ("seq", "event", "state", "ts", "attempt", "losses", "due_at", "worker")
_AFTER = ("seq", "event", "ts", "reason")
_READMITTED = f"coalesce(before_state in ({name_list(OVER)}), false)"


def in_order(transitions: DataFrame) -> DataFrame:
    """Return the transitions of tasks, each once, with what the same task's one before and after it say in the run.

    ``before_seq`` and others, ``after_seq`` and others: null where there is none. ``begins``: a life begins here.
    A key lives in one shard of a run, so within both the number is the order; clocks may be set back. Rows are spread
    by key and id.
    """
    before, after = (
        [f"{poll}({name}) over ({OF_TASK}) as {side}_{name}" for name in names]
        for poll, side, names in (("lag", "before", _BEFORE), ("lead", "after", _AFTER))
    )
    return (
        transitions.where("task_id != '' and event not in ('configured', 'damaged', 'missing')")
        .repartition("key", "task_id")
        .selectExpr("*", "xxhash64(run, key, task_id) as task_hash")
        .selectExpr("*", *before)
        # One that is there twice says the same twice: what comes behind sees no difference.
        .where("before_seq is null or before_seq != seq")
        .selectExpr(
            "*", *after, f"event = 'published' or (event = 'retried' and {_READMITTED}) as begins"
        )
    )


def steps(transitions: DataFrame) -> DataFrame:
    """Return what `in_order` does, with the lives of each task and what may be missing.

    ``life``: counts lives within the run, from 1. ``began``, ``over`` and ``holes`` of its run and shard (see `gaps`),
    ``holes`` with the times at which the queue was not noted. ``hidden``: something that is missing lies between the
    one before (or number 1) and this one.
    """
    life = f"count_if(begins or before_seq is null) over ({OF_TASK}) as life"
    rows = in_order(transitions).selectExpr("*", life)
    rows = rows.join(spans(transitions).hint("broadcast"), ["run", "shard"], "left")
    rows = rows.join(switches(transitions).hint("broadcast"), ["run", "key"], "left")
    rows = rows.selectExpr(
        "* except (holes, dark)", "coalesce(concat(holes, dark), holes, dark) as holes"
    )
    return rows.withColumn("hidden", Holes.between(F.col("before_seq"), F.col("seq")))


def code_of(column: str, names: tuple[str, ...]) -> str:
    """Return the place of a name among some, from 1; 0 for another. Numbers are aggregated faster than names."""
    return f"array_position(array({name_list(names)}), {column})"


def name_of(code: str, names: tuple[str, ...]) -> str:
    """Return the name at a place; null for none."""
    return f"if({code} > 0, element_at(array({name_list(names)}), cast({code} as int)), null)"
