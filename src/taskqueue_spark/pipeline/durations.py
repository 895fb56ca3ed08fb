"""Durations between the transitions of a task: waiting time, running time and total time.

The events of a task are ordered by ``seq`` within its run and shard, not by time, because a clock may be set back. A
row that was read twice counts once. A duration is null if the history that it needs is missing: the waiting time needs
the event that made the task available, the running time the event that ends the execution, and the total time the
beginning of the task. Missing events that leave a plausible history cannot be detected here, for example a redelivery
that is missing together with the delivery before it; `gaps` reports such gaps.
"""

from __future__ import annotations

import re

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn

from taskqueue_core.authoring.entries import POISONED
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.task_steps import ENDED, OF_TASK, in_order, name_list

MICROSECONDS = 1_000_000
_FIRST = ("done", "dead", "expired", "cancelled")
"""states in which a live task may end"""
_ENDS = ("acked", "retried", "dead_lettered", "redelivered", "lost", "expired", "cancelled")
"""events that end an execution"""
_OUTCOMES = ("acked", "retried", "dead_lettered")
"""events that report the outcome of an execution"""
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_WINDOW = re.compile(rf"([1-9]\d{{0,6}}) ({'|'.join(_UNITS)})s?")


def seconds_of(window: object) -> int:
    """Return the length in seconds of a window such as "1 minute" or "30 seconds". Raises `InvalidInput`."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    if match is None:
        allowed = f"a whole number and one of {', '.join(_UNITS)}, as in '1 minute'"
        raise InvalidInput("window", kind_of(window), allowed)
    return int(match[1]) * _UNITS[match[2]]


def steps(transitions: DataFrame) -> DataFrame:
    """Return every transition of a task once, with durations from the transitions before and after it.

    The columns are those of a transition (``tenant`` is the one with which the life was published) and these:

    - ``queue_wait`` (of a delivery): microseconds since the task was published, redriven or released, or since its
      scheduled time, even if the task was made available later. Waiting for an ordering key or a limit is included.
    - ``run_time`` (of acked, retried and dead_lettered directly after a delivery): microseconds since that delivery. A
      task that becomes a dead letter because of losses has no running time.
    - ``end_to_end`` (of the first end of a life: acked, dead_lettered, expired or cancelled): microseconds since the
      publish, or since the time for which that publish scheduled the task. A dead letter that is redriven or retried
      has already had its first end. A retry after any other end begins a new life at the time of the retry.
    - ``first_end``: whether the event is such a first end, even if ``end_to_end`` is unknown.
    - ``waiting_since`` (if the task is waiting after the event): the time when it began to wait.
    - the columns of `in_order`: ``before_event``, ``before_ts``, ``after_event``, ``after_ts``, ``after_reason``…

    Durations may be negative if a clock was set back.
    """
    promoted = "event = 'available' and before_due_at <= ts"
    again = "coalesce(revival > coalesce(birth.seq, 0), false)"
    ended = f"coalesce(before_state in ({name_list(ENDED)}), false)"
    first = f"state in ({name_list(_FIRST)}) and not {ended} and not {again}"
    ran = f"event in ({name_list(_OUTCOMES)}) and not {_poisoned('event', 'reason')} and before_event = 'delivered'"
    return (
        in_order(transitions)
        .selectExpr(
            "*",
            f"case when {promoted} then before_due_at when state = 'waiting' then ts end as waiting_since",
            "if(begins, named_struct('at', greatest(ts, due_at), 'tenant', tenant, 'seq', seq), null) as born",
            "if(event = 'redriven' or before_state = 'dead', seq, null) as revived",
        )
        .selectExpr(
            "* except (born, revived)",
            f"lag(waiting_since) over ({OF_TASK}) as available_at",
            f"last(born, true) over ({OF_TASK}) as birth",
            f"last(revived, true) over ({OF_TASK}) as revival",
        )
        .selectExpr(
            "* except (birth, revival, tenant)",
            "coalesce(tenant, birth.tenant) as tenant",
            f"{first} as first_end",
            "if(event = 'delivered', unix_micros(ts) - unix_micros(available_at), null) as queue_wait",
            f"if({ran}, unix_micros(ts) - unix_micros(before_ts), null) as run_time",
            f"if({first}, unix_micros(ts) - unix_micros(birth.at), null) as end_to_end",
        )
    )


def executions(transitions: DataFrame) -> DataFrame:
    """Return a row per delivery: the transition, and the end of the execution.

    Three columns are added to those of `steps`. ``until``: the time of the task's next event, by which the execution
    had ended (null if there is none). ``ended_by``: the event that ended the execution (null if it still runs, or if
    the event is missing). ``verdict``: whether the outcome of the execution is known. If ``ended_by`` is known, the
    execution took ``until - ts``.
    """
    after = f"after_event in ({name_list(_OUTCOMES)}) and not {_poisoned('after_event', 'after_reason')}"
    return (
        steps(transitions)
        .where("event = 'delivered'")
        .selectExpr(
            "*",
            "after_ts as until",
            f"if(after_event in ({name_list(_ENDS)}), after_event, null) as ended_by",
            f"coalesce({after}, false) as verdict",
        )
    )


def run_ends(transitions: DataFrame) -> DataFrame:
    """Return each ``run`` and the time of its last event (``heard_at``), which counts as the end of open executions."""
    return transitions.groupBy("run").agg(fn.max("ts").alias("heard_at"))


def _poisoned(event: str, reason: str) -> str:
    """Return the SQL condition for a task that became a dead letter because of losses, without a last outcome."""
    return f"({event} = 'dead_lettered' and {reason} <=> '{POISONED}')"
