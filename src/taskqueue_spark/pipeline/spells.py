"""What lies between the transitions of a task: how long it waited, how long it ran, how long it took in all.

The events of a task are put in order by ``seq`` within its run and shard, never by their times: a clock may
be set back. A row that was read twice counts once. Where history is missing, what it would have told is null:
a delivery is known to have waited only if the event before it made the task available, an execution is known
to have ended only if the event after it ends one, a task is known to have taken so long only if its birth is
there. Missing events that leave a likely story behind (a redelivery cut out together with the delivery before
it) cannot be seen here; ``audit.gaps`` tells of them.
"""

from __future__ import annotations

import re

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from taskqueue_core.entries import POISONED
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.steps import ENDED, OVER

__all__ = ["MICROSECONDS", "executions", "micros", "run_ends", "seconds_of", "steps"]

MICROSECONDS = 1_000_000
_FIRST = ("done", "dead", "expired", "cancelled")
"""states that a live entry can end in"""
_ENDS = ("acked", "retried", "dead_lettered", "redelivered", "lost", "expired", "cancelled")
"""events that end an execution"""
_VERDICTS = ("acked", "retried", "dead_lettered")
"""those that say how it went; the others say that nobody will know"""
_TASK = ("run", "shard", "key", "task_id")
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_WINDOW = re.compile(rf"([1-9]\d{{0,6}}) ({'|'.join(_UNITS)})s?")


def seconds_of(window: object) -> int:
    """Return the length of a window, written as "1 minute" or "30 seconds". Raises `InvalidInput`."""
    found = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    if found is None:
        allowed = f"a whole number and one of {', '.join(_UNITS)}, as in '1 minute'"
        raise InvalidInput("window", kind_of(window), allowed)
    return int(found[1]) * _UNITS[found[2]]


def micros(moment: str | Column) -> Column:
    """Return a moment as whole microseconds since 1970."""
    return fn.unix_micros(moment)


def steps(transitions: DataFrame) -> DataFrame:
    """Return every transition of a task once, with what the ones before and after it tell.

    Beside its own columns, of which ``tenant`` is the one that its life was published with:

    - ``queue_wait`` (of a delivery): microseconds since the task became available, which is when it was
      published, redriven or handed back, or when a time that it was scheduled for had come (whenever somebody
      noticed). Being held for the sake of an ordering key or of a limit is waiting;
    - ``run_time`` (of acked, retried and dead_lettered, where the event before it is the delivery):
      microseconds since then. What dies for being lost too often did not run to a verdict;
    - ``end_to_end`` (of the first end of a life: acked, dead_lettered, expired or cancelled): microseconds
      since it was published, or since the time that it was scheduled for then. What is redriven, or revived
      from the dead by a retry, has had its first end; a retry of what had ended otherwise begins a life at
      its own time;
    - ``first_end`` whether it is such an end, also where nobody knows since when;
    - ``waiting_since`` (where the task waits after it): since when;
    - ``before_event``, ``before_state``, ``before_at``, ``after_event``, ``after_at``, ``after_reason``.

    Durations may be negative where a clock was set back.
    """
    order = Window.partitionBy(*_TASK).orderBy("seq")
    so_far = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    event, state, at = fn.col("event"), fn.col("state"), fn.col("ts")
    own = "ts", "seq", "event", "state", "priority", "tenant", "worker", "reason", "due_at"
    rows = (
        transitions.where(fn.col("task_id") != "")
        .select(*_TASK, *own)
        .withColumn("before_seq", fn.lag("seq").over(order))
        .where(fn.col("before_seq").isNull() | (fn.col("before_seq") != fn.col("seq")))
        .withColumns(
            {
                "before_event": fn.lag("event").over(order),
                "before_state": fn.lag("state").over(order),
                "before_at": fn.lag("ts").over(order),
                "before_due": fn.lag("due_at").over(order),
                "after_event": fn.lead("event").over(order),
                "after_at": fn.lead("ts").over(order),
                "after_reason": fn.lead("reason").over(order),
            }
        )
    )
    before = fn.col("before_state")
    born = (event == "published") | ((event == "retried") & before.isin(*OVER))
    promoted = (event == "available") & (fn.col("before_due") <= at)
    birth = fn.struct(fn.greatest("ts", "due_at").alias("at"), "tenant", "seq")
    rows = rows.withColumns(
        {
            "waiting_since": fn.when(promoted, fn.col("before_due")).when(state == "waiting", at),
            "birth": fn.when(born, birth),
            "revival": fn.when((event == "redriven") | (before == "dead"), fn.col("seq")),
        }
    ).withColumns(
        {
            "available_at": fn.lag("waiting_since").over(order),
            "birth": fn.last("birth", ignorenulls=True).over(so_far),
            "revival": fn.last("revival", ignorenulls=True).over(so_far),
        }
    )
    again = fn.coalesce(fn.col("revival") > fn.coalesce("birth.seq", fn.lit(0)), fn.lit(col=False))
    ended = state.isin(*_FIRST) & ~fn.coalesce(before.isin(*ENDED), fn.lit(col=False)) & ~again
    verdict = event.isin(*_VERDICTS) & ~_poisoned("event", "reason")
    ran = verdict & (fn.col("before_event") == "delivered")
    return rows.withColumns(
        {
            "tenant": fn.coalesce("tenant", "birth.tenant"),
            "first_end": ended,
            "queue_wait": fn.when(event == "delivered", micros("ts") - micros("available_at")),
            "run_time": fn.when(ran, micros("ts") - micros("before_at")),
            "end_to_end": fn.when(ended, micros("ts") - micros("birth.at")),
        }
    ).drop("birth", "revival", "before_seq", "before_due")


def executions(transitions: DataFrame) -> DataFrame:
    """Return a row per delivery: the transition, and what is known of the execution.

    Beside the columns of `steps`: ``until``, when it was over at the latest as far as the journal tells (the
    task's next event; null if there is none); ``ended_by``, the event that ended it (null if it goes on, or
    where the event is missing); ``verdict``, whether that says how it went. Its length is ``until - ts``
    where ``ended_by`` is known.
    """
    after = fn.col("after_event")
    verdict = after.isin(*_VERDICTS) & ~_poisoned("after_event", "after_reason")
    return (
        steps(transitions)
        .where(fn.col("event") == "delivered")
        .withColumns(
            {
                "until": fn.col("after_at"),
                "ended_by": fn.when(after.isin(*_ENDS), after),
                "verdict": fn.coalesce(verdict, fn.lit(col=False)),
            }
        )
    )


def run_ends(transitions: DataFrame) -> DataFrame:
    """Return when each run was last heard of: run, heard_at. What was open then is taken to have ended then."""
    return transitions.groupBy("run").agg(fn.max("ts").alias("heard_at"))


def _poisoned(event: str, reason: str) -> Column:
    """Whether the event is a death by losses, of which nobody knows how the execution went."""
    return (fn.col(event) == "dead_lettered") & fn.col(reason).eqNullSafe(POISONED)
