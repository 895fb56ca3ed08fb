"""The conservation audit: it checks that every published task has ended or still exists.

A life of a task begins with a publish, or with a retry after the task's end. Each life has one verdict (`VERDICTS`),
and possibly anomalies (`ANOMALIES`); docs/pipeline.md explains them. The counts of a queue's verdicts add up to its
number of lives. Unless there is a fault, so do the columns ``published`` and ``earlier`` of `conservation`.

The column ``reason`` says how a loss was detected. *not in the store*: the store does not have the task, and its last
event is older than the grace period. *its run ended*: the shard has a later run, because its store was
restarted empty or replaced. *published again*: the store accepted the id for a new task while the task was alive.

An unfinished task counts as lost if its shard has a later run, unless ``live`` (see `audit`) shows that it exists.
The journals of the two stores of a migration look like an earlier and a later run. Audit them together only with
``live``, or if both stores were in use at the same time. Each shard of a queue is audited as a queue; `against` adds
the shards up.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_core.tasks import State
from taskqueue_spark.columns import TASK_EVENTS
from taskqueue_spark.pipeline.gaps import missing_after
from taskqueue_spark.pipeline.task_steps import (
    AT_REST,
    ENDED,
    OVER,
    TASK,
    code_of,
    name_list,
    name_of,
    steps,
)

VERDICTS = (
    "completed", "dead_lettered", "discarded", "expired", "cancelled", "blocked", "waiting", "scheduled",
    "in_flight", "unknown",
    "lost",
)  # fmt: skip
ANOMALIES = (
    "orphan", "duplicate_ack", "conflict", "after_end", "not_delivered", "published_again", "contradiction",
)  # fmt: skip
"""Faults in the history of a life. In this order, they mean: never published · acked twice · ended in two ways · had an
event after its end · settled without a delivery · published again while alive · has a transition whose number a
different transition has too"""
_STATES = tuple(State)
_OF_STATE = {State.DONE: "completed", State.DEAD: "dead_lettered"}
_ENDS = ("acked", "dead_lettered", "discarded", "expired", "cancelled")
_SHARD = r":s\d{1,3}@\d{1,9}x\d{1,4}-[0-9a-f]{4}$"
_COUNTED = {
    "deliveries": "delivered",
    "redeliveries": "redelivered",
    "retries": "retried",
    "losses": "lost",
}
_STARTS = "(begins or (event = 'retried' and before_seq is null and not hidden))"
_WAS_ENDED = f"before_state in ({name_list(ENDED)})"
_READMITTED = "(event = 'acked' and before_state <=> 'done')"
_LOOKING_BACK = {
    "orphan": f"before_seq is null and not {_STARTS}",
    "duplicate_ack": _READMITTED,
    "conflict": f"event in ({name_list(_ENDS)}) and event != 'discarded' and {_WAS_ENDED} and not {_READMITTED}",
    "after_end": f"event in ('available', 'delivered', 'redelivered', 'lost') and {_WAS_ENDED}",
    "not_delivered": f"event in ('acked', 'redelivered', 'lost') and before_state in ({name_list(AT_REST)})",
    "published_again": f"event = 'published' and before_state not in ({name_list(OVER)})",
}
"""SQL condition of each anomaly that is checked only on steps before which no transition is missing"""
_ODD = {name: f"{condition} and not hidden" for name, condition in _LOOKING_BACK.items()}
_ODD["contradiction"] = "contradicted"
"""SQL condition of each anomaly"""
_OF_LIFE = {
    "shard": "min(shard)",
    "first_seq": "min(seq)",
    "last_seq": "max(seq)",
    "last_at": "max_by(ts, seq)",
    "published_at": f"min(ts) filter (where {_STARTS})",
    "ended_at": f"max(ts) filter (where event in ({name_list(_ENDS)}))",
    "attempts": "max(attempt)",
    "_event": f"max_by({code_of('event', TASK_EVENTS)}, seq)",
    "_state": f"max_by({code_of('state', _STATES)}, seq)",
    "_hole": "max_by(_hole, seq)",
    "_flags": "bit_or(_flags)",
    "_whole": "bool_and(_whole)",
    "_over": "bool_or(over)",
    "_began": "min(began)",
    **{column: f"count_if(event = '{name}')" for column, name in _COUNTED.items()},
}


def audit(
    transitions: DataFrame,
    *,
    live: DataFrame | None = None,
    as_of: datetime | None = None,
    grace_seconds: float = 60.0,
) -> DataFrame:
    """Return a row per life of each task. The section "Tables" of docs/pipeline.md describes the columns.

    ``live``: current states in the store, with the columns ``key``, ``task_id``, ``state`` and optionally ``as_of``. A
    task without a row or with a null state is not in the store. Query the store before you read the journal, or query
    each task before its ``dedupe_window`` has passed, because the store remembers finished tasks for that long.
    ``live`` is evaluated twice; cache it first if it queries the store. ``as_of``: the time of the query, if ``live``
    does not contain it; by default, the time of the last transition. ``grace_seconds``: a task that is not in the store
    counts as lost only if its last event is older than this many seconds.
    """
    result = _lives(steps(transitions))
    if live is None:
        return result.selectExpr(*_columns(looked=False))
    value = live.selectExpr("key", "task_id", "state as _now").dropDuplicates(["key", "task_id"])
    result = result.join(value, ["key", "task_id"], "left")
    result = result.crossJoin(F.broadcast(_asked_at(transitions, live, as_of)))
    old = f"unix_micros(_asked) - unix_micros(last_at) > {round(grace_seconds * 1e6)} as _old"
    return result.selectExpr("*", old).selectExpr(*_columns(looked=True))


def _lives(rows: DataFrame) -> DataFrame:
    """Return a row per life. Events and states are encoded as numbers, which Spark aggregates many times faster."""
    flags = " + ".join(f"if({_ODD[name]}, {1 << bit}, 0)" for bit, name in enumerate(ANOMALIES))
    # Sorting by the hash puts the lives of a task next to each other, and is faster than sorting by name.
    same = "partition by _hash, key, task_id order by _began, run, life"
    return (
        rows.withColumn("_hole", missing_after(F.col("seq")))
        .selectExpr("*", f"{flags} as _flags", "holes is null as _whole")
        .groupBy(*TASK, "life")
        .agg(*(F.expr(text).alias(name) for name, text in _OF_LIFE.items()))
        .selectExpr("*", "xxhash64(key, task_id) as _hash")
        .selectExpr(
            "* except (life)",
            f"lead(life) over ({same}) is null as _latest",
            f"if(lead(run) over ({same}) = run, lead(first_seq) over ({same}), null) as _next",
            f"row_number() over ({same}) as life",
        )
    )


def _asked_at(transitions: DataFrame, live: DataFrame, as_of: datetime | None) -> DataFrame:
    """Return the time at which the store was queried (``_asked``), as a table with one row."""
    if as_of is not None:
        return live.sparkSession.range(1).select(F.lit(as_of).cast("timestamp").alias("_asked"))
    requested = transitions.agg(F.max("ts").alias("_asked"))
    if "as_of" not in live.columns:
        return requested
    result = live.agg(F.min("as_of").alias("_as_of"))
    return result.crossJoin(requested).select(F.coalesce("_as_of", "_asked").alias("_asked"))


def _columns(*, looked: bool) -> list[str]:
    """Return the columns of an audit. ``looked``: whether the store was queried for the states of tasks (``_now``)."""
    state = name_of("_state", _STATES)
    ended, over = (f"coalesce({state} in ({name_list(names)}), false)" for names in (ENDED, OVER))
    hidden = f"coalesce(_hole < coalesce(_next, {2**62}), false)"
    doubtful = _has("contradiction")
    matches = "(_latest and _now is not null)" if looked else "false"
    absent = "(_latest and _now is null and _old)" if looked else "false"
    reason = f"""case when {ended} or {matches} or {hidden} or {doubtful} then null
        when _next is not null then 'published again' when _over then 'its run ended'
        when {absent} then 'not in the store' end"""
    now = f"if({matches} and ({doubtful} or not {over}), _now, {state})" if looked else state
    named = " ".join(f"when '{name}' then '{verdict}'" for name, verdict in _OF_STATE.items())
    verdict = f"""case when ({reason}) is not null then 'lost' when not {over} and {hidden} and not {matches}
        or {doubtful} and not {matches} then 'unknown' else case {now} {named} else {now} end end"""
    odd = ", ".join(f"if({_has(name)}, '{name}', null)" for name in ANOMALIES)
    return [
        "key", "task_id", "life", f"{verdict} as verdict", f"{reason} as reason",
        "published_at", "first_seq", "last_seq", "last_at", f"if({ended}, ended_at, null) as ended_at",
        f"{name_of('_event', TASK_EVENTS)} as last_event",
        *(f"cast({name} as int) as {name}" for name in ("attempts", *_COUNTED)),
        f"if(_flags = 0, cast(array() as array<string>), array_compact(array({odd}))) as anomalies",
        f"published_at is null and not {_has('orphan')} as earlier", "_whole as complete", "run", "shard",
    ]  # fmt: skip


def _has(anomaly: str) -> str:
    return f"(_flags & {1 << ANOMALIES.index(anomaly)} > 0)"


def conservation(audited: DataFrame) -> DataFrame:
    """Return a row per ``key``: ``published``, ``earlier``, a count per verdict, ``balanced`` and ``complete``.

    ``published``: number of lives whose beginning is in the journal. ``earlier``: number of other lives, except
    orphans. ``balanced``: ``published`` and ``earlier`` together equal the sum of the verdicts, and no life has the
    anomaly ``contradiction``. If a queue is not
    ``complete``, part of its journal is missing, and tasks may have been lost in that part even if no loss is counted.
    """
    sums = {
        "published": "count(published_at)",
        "earlier": "count_if(earlier)",
        **{name: f"count_if(verdict = '{name}')" for name in VERDICTS},
        "_lives": "count(*)",
        "_doubtful": "bool_or(array_contains(anomalies, 'contradiction'))",
        "complete": "bool_and(complete)",
    }
    total = " + ".join(VERDICTS)
    return (
        audited.groupBy("key")
        .agg(*(F.expr(text).alias(name) for name, text in sums.items()))
        .selectExpr(
            "key", "published", "earlier", *VERDICTS,
            f"published + earlier = {total} and {total} = _lives and not _doubtful as balanced", "complete",
        )
    )  # fmt: skip


def against(conserved: DataFrame, ledgers: DataFrame) -> DataFrame:
    """Compare the audit with the ledgers of the store.

    Return ``key``, the count of the ledger for each state (``ledger_…``), its difference from the audit (``more_…``),
    and ``agrees`` if all differences are 0.

    ``ledgers``: ``published`` and a count per state for each ``key``. Tasks that only the ledger has are older than the
    journal, or newer than the transitions. Tasks that only the audit has are lost, or were counted wrongly. The shards
    of a sharded queue are added up.
    """
    counts = {"published": "published + earlier"}
    counts |= {state.value: _OF_STATE.get(state, state.value) for state in State}
    whole = F.regexp_replace("key", _SHARD, "").alias("key")
    audited = conserved.groupBy(whole).agg(
        *(F.expr(f"sum({text}) as _{name}") for name, text in counts.items())
    )
    stored = ledgers.groupBy(whole).agg(
        *(F.expr(f"sum({name}) as ledger_{name}") for name in counts)
    )
    more = {name: f"coalesce(ledger_{name}, 0) - coalesce(_{name}, 0)" for name in counts}
    return audited.join(stored, "key", "full").selectExpr(
        "key",
        *(f"ledger_{name}" for name in counts),
        *(f"{difference} as more_{name}" for name, difference in more.items()),
        " and ".join(f"{difference} = 0" for difference in more.values()) + " as agrees",
    )
