"""The history check: the rules that every run must keep, over what the journal tells of it.

- R0: an id is not published while it is alive or dead, nor within its queue's ``dedupe_window`` after its end.
- R1: the first sign of a task is its publish; what an `audit` found ``lost`` breaks it.
- R2: what is acked, handed back or buried was in flight.
- R3: nothing is made available or handed out after its end, unless it was redriven or retried.
- R4: no end, and no hand-back, follows on an end; only the dead are redriven or discarded.
- R5: tokens are not in the journal, but what they are for: one hand-out at a time, settled by the worker that had it.
- R6: the attempt grows by a retry, by 1; the losses by a loss, by 1, and are at most ``max_losses`` at a hand-out.
- R7: first hand-outs of a queue and priority (and tenant, if its order was ever fair) are in the order in which the
  tasks became available. One with an ordering key may come late, but overtakes nobody.
- R8: of an ordering key the next is handed out when the one before has ended or died, and first ones are in order.
- R9: what is scheduled becomes available at its time (2 ms for rounding), and is handed out only then.
- R10: no hand-out beyond ``max_inflight``, or a tenant's.
- R11: in no span of time more hand-outs than burst + rate * span, counted from each change of settings on.
- R12: no hand-out while the settings in force say ``paused``.
- R13: deadlines are not in the journal, but ``expired``: nothing is handed out after that.

Where the chaos tests' checker must leave room for what a client cannot see, the journal is exact: numbers order what
one partition did, so there is no room but for rounding. R10 and R11 are told of once per limit and change of settings.
A rule that looks back holds its tongue where something is missing in between (see `gaps`), and one that needs settings
where these may be what is missing: R7 looks at each tenant alone then. A sharded queue's shards are queues of their
own: R8 is not followed over a change of their number. Attempts beyond ``max_attempts`` are the retry policy's matter,
and not the store's.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from taskqueue_spark.pipeline.gaps import Holes
from taskqueue_spark.pipeline.rules import per_lane, per_task
from taskqueue_spark.pipeline.settings_history import settings
from taskqueue_spark.pipeline.task_steps import OF_TASK, name_list, steps

RULES = tuple(f"R{number}" for number in range(14))
_COLUMNS = ("rule", "key", "task_id", "run", "shard", "seq", "text")
_SPAN = (
    "seq", "ts", "version", "max_losses", "dedupe_window", "paused", "order", "max_inflight", "rate", "burst",
    "tenant_max_inflight", "tenant_rate", "tenant_burst",
)  # fmt: skip


def violations(transitions: DataFrame, audited: DataFrame | None = None) -> DataFrame:
    """Return a row per rule broken once: ``rule``, ``key``, ``task_id``, ``run``, ``shard``, ``seq`` and a ``text``.

    ``audited``: an `audit` of the same transitions, of which what is lost breaks R1.
    """
    rows = _with_settings(steps(transitions), transitions)
    result = per_lane.broken(_entries(rows))
    once = result.groupBy(*per_lane.LANE, F.coalesce("part", "seq").alias("part")).agg(
        F.min_by(F.struct("task_id", "seq", "text"), "seq").alias("one")
    )
    broken = once.select(*per_lane.LANE, "one.*").select(*_COLUMNS)
    if audited is None:
        return broken
    lost = audited.where(F.col("verdict") == "lost")
    text = F.concat_ws(": ", F.lit("lost"), F.col("reason"))
    return broken.unionByName(
        lost.select(
            F.lit("R1").alias("rule"),
            *_COLUMNS[1:5],
            F.col("last_seq").alias("seq"),
            text.alias("text"),
        )
    )


def counts(result: DataFrame) -> DataFrame:
    """Return ``rule`` and ``count`` for every rule, 0 where none was broken."""
    every = f"explode(array({name_list(RULES)})) as rule"
    number = result.groupBy("rule").agg(F.count("*").alias("count"))
    return (
        result.sparkSession.range(1)
        .selectExpr(every)
        .join(number.hint("broadcast"), "rule", "left")
        .selectExpr("rule", "coalesce(count, 0) as count")
    )


def _with_settings(rows: DataFrame, transitions: DataFrame) -> DataFrame:
    """Add whose each task is, and what its queue was told: ever (``spans``), and last (``span``).

    ``blind``: what it was told last may be missing; ``unset``: what it was told first. Versions grow by one, so the
    settings of the next one say that nothing was told in between.
    """
    owner = f"last(if(begins, struct(tenant, ordering_key), null), true) over ({OF_TASK})"
    spans = (
        settings(transitions)
        .groupBy("run", "key")
        .agg(F.sort_array(F.collect_list(F.struct(*_SPAN))).alias("spans"))
    )
    in_force = F.filter("spans", lambda span: span["seq"] < F.col("seq"))
    return (
        rows.withColumn("owner", F.expr(owner))
        .join(F.broadcast(spans), ["run", "key"], "left")
        .withColumn("span", F.try_element_at(in_force, F.lit(-1)))
        .withColumn("coming", F.expr("get(filter(spans, one -> one.seq > seq), 0)"))
        .withColumn("blind", Holes.between(F.col("span.seq"), F.col("seq")) & ~_follows("span", "coming"))
        .withColumn("first", F.expr("get(spans, 0)"))
        .withColumn("unset", Holes.between(F.lit(None), F.least("seq", "first.seq")) & ~_follows(None, "first"))
    )  # fmt: skip


def _follows(name: str | None, other: str) -> Column:
    version = "0" if name is None else f"coalesce({name}.version, 0)"
    return F.expr(f"coalesce({other}.version = {version} + 1, false)")


def _entries(rows: DataFrame) -> DataFrame:
    """Return the entries of all lanes; what a step breaks by itself is one in a lane of its own."""
    kinds = per_lane.entries()
    for index, (rule, condition, text) in enumerate(per_task.broken()):
        lane = F.concat(F.lit(f"{index}/"), F.col("task_id"))
        kinds.append(per_lane.LaneEntry(rule, condition, {"lane": lane, "text": text}))
    # First only which, and then what: most steps are none, and what is not asked for costs nothing.
    which = [F.when(kind.condition, F.lit(index)) for index, kind in enumerate(kinds)]
    result = rows.withColumn("kind", F.explode(F.array_compact(F.array(*which))))
    rules = F.array(*(F.lit(kind.rule) for kind in kinds))
    broken = F.element_at(rules, F.col("kind") + 1)
    fields = []
    for name, form in per_lane.FIELDS.items():
        value: Column = F.lit(None)
        for place, kind in enumerate(kinds):
            if name in kind.fields:
                value = F.when(F.col("kind") == place, kind.fields[name]).otherwise(value)
        fields.append(value.cast(form).alias(name))
    return result.select("run", "shard", "key", "task_id", "seq", broken.alias("rule"), *fields)
