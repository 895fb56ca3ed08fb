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

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn

from taskqueue_core.authoring.entries import POISONED
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.task_steps import ENDED, OF_TASK, in_order, name_list

MICROSECONDS = 1_000_000
_FIRST = ("done", "dead", "expired", "cancelled")
"""states that a live entry can end in"""
_ENDS = ("acked", "retried", "dead_lettered", "redelivered", "lost", "expired", "cancelled")
"""events that end an execution"""
_VERDICTS = ("acked", "retried", "dead_lettered")
"""those that say how it went; the others say that nobody will know"""
_UNITS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400}
_WINDOW = re.compile(rf"([1-9]\d{{0,6}}) ({'|'.join(_UNITS)})s?")


def seconds_of(window: object) -> int:
    """Return the length of a window, written as "1 minute" or "30 seconds". Raises `InvalidInput`."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    if match is None:
        allowed = f"a whole number and one of {', '.join(_UNITS)}, as in '1 minute'"
        raise InvalidInput("window", kind_of(window), allowed)
    return int(match[1]) * _UNITS[match[2]]


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
    - what `in_order` has: ``before_event``, ``before_ts``, ``after_event``, ``after_ts``, ``after_reason``…

    Durations may be negative where a clock was set back.
    """
    promoted = "event = 'available' and before_due_at <= ts"
    again = "coalesce(revival > coalesce(birth.seq, 0), false)"
    ended = f"coalesce(before_state in ({name_list(ENDED)}), false)"
    first = f"state in ({name_list(_FIRST)}) and not {ended} and not {again}"
    ran = f"event in ({name_list(_VERDICTS)}) and not {_poisoned('event', 'reason')} and before_event = 'delivered'"
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
    """Return a row per delivery: the transition, and what is known of the execution.

    Beside the columns of `steps`: ``until``, when it was over at the latest as far as the journal tells (the
    task's next event; null if there is none); ``ended_by``, the event that ended it (null if it goes on, or
    where the event is missing); ``verdict``, whether that says how it went. Its length is ``until - ts``
    where ``ended_by`` is known.
    """
    after = f"after_event in ({name_list(_VERDICTS)}) and not {_poisoned('after_event', 'after_reason')}"
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
    """Return when each run was last heard of: run, heard_at. What was open then is taken to have ended then."""
    return transitions.groupBy("run").agg(fn.max("ts").alias("heard_at"))


def _poisoned(event: str, reason: str) -> str:
    """Whether the event is a death by losses, of which nobody knows how the execution went."""
    return f"({event} = 'dead_lettered' and {reason} <=> '{POISONED}')"
