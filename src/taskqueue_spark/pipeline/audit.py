"""The conservation audit: every published task has ended, or is where it is now; and if not, that is said.

Each life of a task has one verdict (`VERDICTS`), and what is odd about it stands beside (`ANOMALIES`), so the verdicts
of a queue always add up to its lives, and to what was published unless something was not as it must be.

- A life ends as its events say: ``completed``, ``dead_lettered``, ``discarded``, ``expired``, ``cancelled``.
- One without an end is where its last event left it (``waiting``, ``scheduled``, ``in_flight``), or where the store
  says that it is, if it was asked (``live``). Without ``live`` nobody has looked whether it is still there.
- ``unknown`` if what is missing in the journal may tell of its end.
- ``lost`` if nothing is missing that could: ``reason`` says how it is known. *not in the store*: it was looked for, and
  its last event is older than the grace. *its run ended*: a later run of its shard began, which is a memory backend
  that was started again, or a store that was emptied: neither remembers. *published again*: the store took its id for
  a new task while it was alive.

A life that the journal does not have from its beginning counts as ``earlier`` where its beginning may be missing, and
else is an ``orphan``. Runs are told apart: what two stores of a migration have belongs in one audit only together with
``live``, unless they worked at the same time. A sharded queue's shards are keys of their own; `against` sums them up.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from taskqueue_core.tasks import State
from taskqueue_spark.pipeline.gaps import Holes, gaps
from taskqueue_spark.pipeline.steps import ENDED, OVER, TASK, code_of, name_of, steps

__all__ = ["ANOMALIES", "VERDICTS", "against", "audit", "conservation", "gaps"]

VERDICTS = (
    "completed", "dead_lettered", "discarded", "expired", "cancelled", "waiting", "scheduled", "in_flight", "unknown",
    "lost",
)  # fmt: skip
ANOMALIES = ("orphan", "duplicate_ack", "conflict", "after_end", "not_delivered", "published_again")
"""never published · acked twice · ended in two ways · something happened after its end · settled while nobody had it ·
published while a life of it went on"""
_STATES = tuple(State)
_OF_STATE = {State.DONE: "completed", State.DEAD: "dead_lettered"}
_EVENTS = (
    "published", "available", "delivered", "acked", "redelivered", "lost", "retried", "dead_lettered", "redriven",
    "discarded", "expired", "cancelled",
)  # fmt: skip
_ENDS = ("acked", "dead_lettered", "discarded", "expired", "cancelled")
_SHARD = r":s\d{1,3}@\d{1,9}x\d{1,4}-[0-9a-f]{4}$"
_COUNTED = {
    "deliveries": "delivered",
    "redeliveries": "redelivered",
    "retries": "retried",
    "losses": "lost",
}


def audit(
    transitions: DataFrame,
    *,
    live: DataFrame | None = None,
    as_of: datetime | None = None,
    grace_seconds: float = 60.0,
) -> DataFrame:
    """Return a row per life of each task.

    ``key``, ``task_id``, ``life`` (from 1, over all runs), ``verdict``, ``reason`` (of a loss), ``published_at`` (null
    if that is missing), ``first_seq``, ``last_seq``, ``last_at``, ``ended_at``, ``last_event``, ``attempts``,
    ``deliveries``, ``redeliveries``, ``retries``, ``losses``, ``anomalies``, ``earlier``, ``complete`` (nothing at all
    is missing of its run and shard), ``run``, ``shard``.

    ``live``: what the store knows now, with ``key``, ``task_id``, ``state`` (null: not known) and, where each row tells
    it, ``as_of``; a task that it does not have is not in the store. Ask the store first and read the journal after, or
    ask for each task before its ``dedupe_window`` has passed, as what has ended meanwhile is remembered for so long.
    ``as_of``: when that was, unless ``live`` tells; else the journal's last time. ``grace_seconds``: how long before
    that an event must be, for its task to count as lost. ``live`` is looked at twice: keep it, if it asks a store.
    """
    found = _lives(steps(transitions))
    if live is None:
        return found.select(*_columns(_verdict(None)))
    told = live.select("key", "task_id", F.col("state").alias("_now")).dropDuplicates(
        ["key", "task_id"]
    )
    found = found.join(told, ["key", "task_id"], "left")
    found = found.crossJoin(F.broadcast(_asked(transitions, live, as_of)))
    old = F.unix_micros("_asked") - F.unix_micros("last_at") > round(grace_seconds * 1e6)
    return found.select(*_columns(_verdict(old)))


def _lives(rows: DataFrame) -> DataFrame:
    """Return a row per life, of which names are still numbers: those are aggregated many times faster."""
    event, before = F.col("event"), F.col("before_state")
    sure = ~F.col("hidden")
    starts = F.col("begins") | ((event == "retried") & F.col("before_seq").isNull() & sure)
    was_ended, again = before.isin(*ENDED), (event == "acked") & (before == "done")
    odd = {
        "orphan": F.col("before_seq").isNull() & ~starts,
        "duplicate_ack": again,
        "conflict": event.isin(*_ENDS) & (event != "discarded") & was_ended & ~again,
        "after_end": event.isin("available", "delivered", "redelivered", "lost") & was_ended,
        "not_delivered": event.isin("acked", "redelivered", "lost")
        & before.isin("waiting", "scheduled"),
        "published_again": (event == "published") & ~before.isin(*OVER),
    }
    flags = [F.when(odd[name] & sure, 1 << bit).otherwise(0) for bit, name in enumerate(ANOMALIES)]
    marked = rows.select(
        *TASK, "shard", "life", "seq", "ts", "attempt", "next_seq", "began", "event",
        code_of("event", _EVENTS).alias("_event"),
        code_of("state", _STATES).alias("_state"),
        F.when(starts, F.col("ts")).alias("_begun"),
        F.when(event.isin(*_ENDS), F.col("ts")).alias("_end"),
        sum(flags[1:], flags[0]).alias("_flags"),
        Holes.after(F.col("seq")).alias("_hole"),
        F.col("holes").isNull().cast("int").alias("_whole"),
        F.col("over").cast("int").alias("_over"),
    )  # fmt: skip
    counts = [F.sum((event == name).cast("int")).alias(column) for column, name in _COUNTED.items()]
    lives = marked.groupBy(*TASK, "life").agg(
        F.min("shard").alias("shard"),
        F.min("seq").alias("first_seq"),
        F.max("seq").alias("last_seq"),
        F.max_by("ts", "seq").alias("last_at"),
        F.min("_begun").alias("published_at"),
        F.max("_end").alias("ended_at"),
        F.max("attempt").alias("attempts"),
        F.max_by("_event", "seq").alias("_event"),
        F.max_by("_state", "seq").alias("_state"),
        F.max_by("next_seq", "seq").alias("_next"),
        F.max_by("_hole", "seq").alias("_hole"),
        F.bit_or("_flags").alias("_flags"),
        F.min("_whole").alias("_whole"),
        F.max("_over").alias("_over"),
        F.min("began").alias("_began"),
        *counts,
    )
    same = Window.partitionBy("_hash", "key", "task_id")
    by_task = same.orderBy("_began", "run", "life")
    lives = lives.withColumn("_hash", F.xxhash64("key", "task_id"))
    return lives.withColumn("_latest", F.lead("life").over(by_task).isNull()).withColumn(
        "life", F.row_number().over(by_task)
    )


def _asked(transitions: DataFrame, live: DataFrame, as_of: datetime | None) -> DataFrame:
    """Return the one time at which the store was asked."""
    if as_of is not None:
        return live.sparkSession.range(1).select(F.lit(as_of).cast("timestamp").alias("_asked"))
    asked = transitions.agg(F.max("ts").alias("_asked"))
    if "as_of" not in live.columns:
        return asked
    told = live.agg(F.min("as_of").alias("_told"))
    return told.crossJoin(asked).select(F.coalesce("_told", "_asked").alias("_asked"))


def _verdict(old: Column | None) -> tuple[Column, Column]:
    """Return the verdict on a life, and how a loss is known. ``old``: whether what the store lacks is lost."""
    state = name_of(F.col("_state"), _STATES)
    hidden = F.coalesce(F.col("_hole") < F.coalesce("_next", F.lit(2**62)), F.expr("false"))
    again, ran_out = F.col("_next").isNotNull(), F.col("_over") == 1
    absent = F.expr("false") if old is None else F.col("_now").isNull() & F.col("_latest") & old
    found = F.expr("false") if old is None else F.col("_now").isNotNull() & F.col("_latest")
    reason = (
        F.when(state.isin(*ENDED) | found | hidden, None)
        .when(again, "published again")
        .when(ran_out, "its run ended")
        .when(absent, "not in the store")
    )
    now = (
        state
        if old is None
        else F.when(found & ~state.isin(*ENDED), F.col("_now")).otherwise(state)
    )
    named = F.create_map(*(F.lit(word) for pair in _OF_STATE.items() for word in pair))
    verdict = (
        F.when(reason.isNotNull(), "lost")
        .when(~state.isin(*ENDED) & hidden & ~found, "unknown")
        .otherwise(F.coalesce(named[now], now))
    )
    return verdict, reason


def _columns(verdict: tuple[Column, Column]) -> list[Column]:
    odd = F.array_compact(
        F.array(
            *(
                F.when(F.col("_flags").bitwiseAND(1 << bit) > 0, name)
                for bit, name in enumerate(ANOMALIES)
            )
        )
    )
    orphan = F.col("_flags").bitwiseAND(1 << ANOMALIES.index("orphan")) > 0
    known = ("published_at", "first_seq", "last_seq", "last_at")
    ended = F.when(name_of(F.col("_state"), _STATES).isin(*ENDED), F.col("ended_at"))
    counts = [F.col(name).cast("int").alias(name) for name in ("attempts", *_COUNTED)]
    return [
        *map(F.col, ("key", "task_id", "life")),
        verdict[0].alias("verdict"),
        verdict[1].alias("reason"),
        *map(F.col, known),
        ended.alias("ended_at"),
        name_of(F.col("_event"), _EVENTS).alias("last_event"),
        *counts,
        odd.alias("anomalies"),
        (F.col("published_at").isNull() & ~orphan).alias("earlier"),
        (F.col("_whole") == 1).alias("complete"),
        F.col("run"),
        F.col("shard"),
    ]


def conservation(audited: DataFrame) -> DataFrame:
    """Return a row per ``key``: ``published``, ``earlier``, a count per verdict, ``balanced`` and ``complete``.

    ``published``: lives that were seen to begin. ``balanced``: what was published, or is from earlier, is the sum of
    the verdicts. Only where a queue is ``complete`` too does no loss mean that nothing was lost: of what is missing
    nobody knows.
    """
    verdicts = [F.count_if(F.col("verdict") == name).alias(name) for name in VERDICTS]
    sums = audited.groupBy("key").agg(
        F.count("published_at").alias("published"),
        F.count_if("earlier").alias("earlier"),
        *verdicts,
        F.count("*").alias("_lives"),
        F.bool_and("complete").alias("complete"),
    )
    total = sum((F.col(name) for name in VERDICTS[1:]), F.col(VERDICTS[0]))
    counted = (F.col("published") + F.col("earlier") == total) & (total == F.col("_lives"))
    return sums.select(
        "key", "published", "earlier", *VERDICTS, counted.alias("balanced"), "complete"
    )


def against(conserved: DataFrame, ledgers: DataFrame) -> DataFrame:
    """Hold the audit against the stores' own books.

    Returns ``key``, of each state what the ledger says (``ledger_…``) and how much that is more than what the audit
    found (``more_…``), and ``agrees`` where all of that is 0.

    ``ledgers``: per ``key`` ``published`` and a count per state. What a ledger has more is from before the journal, or
    has come since; what it has less is lost, or was counted wrong. A sharded queue's shards are summed up.
    """
    names = {"published": F.col("published") + F.col("earlier")}
    names |= {state.value: F.col(_OF_STATE.get(state, state.value)) for state in State}
    whole = F.regexp_replace("key", _SHARD, "").alias("key")
    found = conserved.groupBy(whole).agg(
        *(F.sum(told).alias(f"_{name}") for name, told in names.items())
    )
    books = ledgers.groupBy(whole).agg(*(F.sum(name).alias(f"ledger_{name}") for name in names))
    both = found.join(books, "key", "full")
    more = {
        name: F.coalesce(f"ledger_{name}", F.lit(0)) - F.coalesce(f"_{name}", F.lit(0))
        for name in names
    }
    agrees = F.expr("true")
    for difference in more.values():
        agrees &= difference == 0
    columns = [both[f"ledger_{name}"] for name in names]
    return both.select(
        "key",
        *columns,
        *(more[name].alias(f"more_{name}") for name in names),
        agrees.alias("agrees"),
    )
