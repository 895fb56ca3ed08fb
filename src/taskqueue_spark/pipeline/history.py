"""The history check: it tests the history of each run, as the journal records it, against these rules.

- R0: an id is not published while its task is live or dead, nor within its queue's ``dedupe_window`` after its end.
- R1: the first event of a task is its publish; a task that an `audit` found ``lost`` breaks this rule too.
- R2: a task that is acked, released or dead-lettered was in flight.
- R3: no task is made available or delivered after its end, unless it was redriven or retried.
- R4: no end and no release follows an end; only dead letters are redriven or discarded.
- R5: a task has one delivery at a time, and the worker that received it settles it. (This is the effect of receipts,
  which are not in the journal.)
- R6: a retry raises the attempt by 1; a loss raises the losses by 1; the losses are at most ``max_losses`` at a
  delivery.
- R7: first deliveries of a queue and priority (and tenant, if the order was ever fair) are in the order in which the
  tasks became available. A task with an ordering key may be late, but overtakes no other task.
- R8: the next task of an ordering key is delivered after the previous one has ended, and first deliveries are in
  order.
- R9: a scheduled task becomes available at its time (with 2 ms for rounding), and is not delivered earlier.
- R10: no delivery exceeds ``max_inflight``, of the queue or of a tenant.
- R11: in no time span are there more deliveries than burst + rate * span, counted from each change of settings.
- R12: no delivery happens while the settings in force say ``paused``.
- R13: no task is delivered after an ``expired`` event. (Deadlines themselves are not in the journal.)

The checker of the chaos tests must tolerate events that a client cannot see. This check tolerates only rounding,
because the numbers of the journal define the order of the events of a partition. R10 and R11 are reported once per
limit and change of settings. A rule that needs earlier transitions is not checked if one of them may be missing (see
`gaps`), and a rule that needs settings is not checked if the settings may be missing; R7 then checks each tenant
separately. The shards of a queue are separate queues: R8 is not checked across a change of their number. Attempts
beyond ``max_attempts`` are a matter of the retry policy, not of the store.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses this name

from taskqueue_spark.pipeline.gaps import missing_between
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
    """Return a row per violation: ``rule``, ``key``, ``task_id``, ``run``, ``shard``, ``seq`` and a ``text``.

    ``audited``: an `audit` of the same transitions, whose lost tasks violate R1.
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
    """Return ``rule`` and ``count`` for every rule, with 0 for a rule without violations."""
    every = f"explode(array({name_list(RULES)})) as rule"
    number = result.groupBy("rule").agg(F.count("*").alias("count"))
    return (
        result.sparkSession.range(1)
        .selectExpr(every)
        .join(number.hint("broadcast"), "rule", "left")
        .selectExpr("rule", "coalesce(count, 0) as count")
    )


def _with_settings(rows: DataFrame, transitions: DataFrame) -> DataFrame:
    """Add the owner of each task, and the settings of its queue: all of them (``spans``), and the last (``span``).

    ``blind``: the last settings may be missing; ``unset``: the first ones may be missing. Versions of settings grow by
    one, so the version of the next settings shows whether there was a change in between.
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
        .withColumn("blind", missing_between(F.col("span.seq"), F.col("seq")) & ~_follows("span", "coming"))
        .withColumn("first", F.expr("get(spans, 0)"))
        .withColumn("unset", missing_between(F.lit(None), F.least("seq", "first.seq")) & ~_follows(None, "first"))
    )  # fmt: skip


def _follows(name: str | None, other: str) -> Column:
    version = "0" if name is None else f"coalesce({name}.version, 0)"
    return F.expr(f"coalesce({other}.version = {version} + 1, false)")


def _entries(rows: DataFrame) -> DataFrame:
    """Return the entries of all lanes. A step that breaks a rule by itself is the only entry of its lane."""
    kinds = per_lane.entries()
    for index, (rule, condition, text) in enumerate(per_task.broken()):
        lane = F.concat(F.lit(f"{index}/"), F.col("task_id"))
        kinds.append(per_lane.LaneEntry(rule, condition, {"lane": lane, "text": text}))
    # Select the kinds of entries first, and compute their fields later, because most steps have no entry.
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
