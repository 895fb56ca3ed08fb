"""The history check: it tests the history that a journal records, run by run, against rules.

The section "What the history check looks for" of docs/pipeline.md lists the rules R0 to R13. The checker of the chaos
tests must tolerate events that a client cannot see. This check tolerates only rounding, because the numbers of the
journal define the order of the events of a partition.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

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
    """Return ``rule``, ``key``, ``task_id``, ``run``, ``shard``, ``seq`` and a ``text`` of each violation.

    Of the violations in one section of a lane (see `per_lane`), only the first is returned.

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
    """Add each task's ``owner`` (tenant and ordering key, which a replacement changes), and the settings of its queue.

    ``spans``: all versions of the settings; ``span``: the version at the step. ``blind``: whether a version between
    ``span`` and the step may be missing; ``unset``: whether the first version may be missing. Each change raises the
    version by one, so the next recorded version shows whether a change in between is missing.
    """
    owner = f"last(if(begins or event = 'replaced', struct(tenant, ordering_key), null), true) over ({OF_TASK})"
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
    """Return the entries of all lanes. A step that breaks a rule of `per_task` is an entry that has a text."""
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
