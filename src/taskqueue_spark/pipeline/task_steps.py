"""The steps (transitions) of each task in order, each with the previous and next one, for the audit and the rules."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_spark.pipeline.gaps import contradictions, missing_between, spans
from taskqueue_spark.pipeline.settings_history import switches

AT_REST = ("blocked", "waiting", "scheduled")
"""states in which no worker has the task"""
OVER = ("done", "expired", "cancelled", "discarded")
"""states in which the id of a task may be published again"""
ENDED = (*OVER, "dead")
TASK = ("run", "key", "task_id")
OF_TASK = "partition by task_hash, run, key, task_id order by seq"
"""the SQL window of a task's steps within a run, in order; sorting by the hash is faster than sorting by name"""


def name_list(names: tuple[str, ...]) -> str:
    """Return names as a list for an SQL expression."""
    return ", ".join(f"'{name}'" for name in names)


_BEFORE = ("seq", "event", "state", "ts", "attempt", "losses", "due_at", "worker")
_AFTER = ("seq", "event", "ts", "reason")
_READMITTED = f"coalesce(before_state in ({name_list(OVER)}), false)"


def in_order(transitions: DataFrame) -> DataFrame:
    """Return the transitions of tasks, each once, with columns of the previous and the next one of the same task.

    The columns ``before_…`` and ``after_…`` are null if there is no such transition. ``begins``: a life begins with
    this transition. A key belongs to one shard of a run, so the number defines the order, even if a clock was set
    back. Rows are partitioned by key and id.
    """
    before, after = (
        [f"{poll}({name}) over ({OF_TASK}) as {side}_{name}" for name in names]
        for poll, side, names in (("lag", "before", _BEFORE), ("lead", "after", _AFTER))
    )
    return (
        transitions.where(
            "task_id != '' and event not in ('configured', 'closed', 'damaged', 'missing')"
        )
        .repartition("key", "task_id")
        .selectExpr("*", "xxhash64(run, key, task_id) as task_hash")
        .selectExpr("*", *before)
        # Removing a duplicate changes nothing for the other transitions, because both rows are equal. If they are
        # not, `steps` marks the number.
        .where("before_seq is null or before_seq != seq")
        .selectExpr(
            "*", *after, f"event = 'published' or (event = 'retried' and {_READMITTED}) as begins"
        )
    )


def steps(transitions: DataFrame) -> DataFrame:
    """Return the rows of `in_order` with the lives of each task and the gaps.

    ``life``: number of the life within the run, from 1. ``began``, ``over`` and ``holes``: see `spans`; ``holes``
    includes the times when the queue wrote no journal. ``hidden``: a transition between the previous one of the task
    (or the beginning) and this one may be missing. ``contradicted``: a different transition has the same number.
    """
    life = f"count_if(begins or before_seq is null) over ({OF_TASK}) as life"
    rows = in_order(transitions).selectExpr("*", life)
    rows = rows.join(spans(transitions).hint("broadcast"), ["run", "shard"], "left")
    doubtful = contradictions(transitions).withColumn("contradicted", F.lit(True))  # noqa: FBT003 - Spark's signature
    rows = rows.join(F.broadcast(doubtful), ["run", "shard", "seq"], "left")
    rows = rows.join(switches(transitions).hint("broadcast"), ["run", "key"], "left")
    rows = rows.selectExpr(
        "* except (holes, dark)", "coalesce(concat(holes, dark), holes, dark) as holes"
    ).fillna(value=False, subset="contradicted")
    return rows.withColumn("hidden", missing_between(F.col("before_seq"), F.col("seq")))


def code_of(column: str, names: tuple[str, ...]) -> str:
    """Return an SQL expression that encodes names as numbers, which Spark aggregates faster; 0 for any other name."""
    return f"array_position(array({name_list(names)}), {column})"


def name_of(code: str, names: tuple[str, ...]) -> str:
    """Return an SQL expression that decodes a number from `code_of` to a name; null for 0."""
    return f"if({code} > 0, element_at(array({name_list(names)}), cast({code} as int)), null)"
