"""What queues were told: their settings as the journal has them, and when they were not noted at all."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from taskqueue_core.flow import IntervalUnit

__all__ = ["settings", "switches"]

_RATE = "struct<max_tokens: double, interval: double, interval_unit: string>"
_SETTINGS = f"""
    version int, journal boolean, max_losses int, dedupe_window double, paused boolean, order string,
    max_inflight int, rate_limit {_RATE}, tenant_max_inflight int, tenant_rate_limit {_RATE}
"""
_EVER = 2**62


def settings(transitions: DataFrame) -> DataFrame:
    """Return each change of settings: ``run``, ``key``, ``seq``, ``ts``, ``until`` and what was set.

    ``until``: the number of the queue's next change, null for none. Rates are tokens (``burst``) and tokens per second
    (``rate``).
    """
    told = F.from_json("reason", _SETTINGS)
    chosen = ["run", "shard", "key", "seq", "ts"]
    changes = (
        transitions.where(F.col("event") == "configured")
        .select(*chosen, told.alias("told"))
        .dropDuplicates(["run", "shard", "seq"])
        .select(*chosen, "told.*")
    )
    for name in ("", "tenant_"):
        limit = F.col(f"{name}rate_limit")
        changes = changes.withColumn(f"{name}burst", limit["max_tokens"]).withColumn(
            f"{name}rate",
            limit["max_tokens"] / (limit["interval"] * _seconds(limit["interval_unit"])),
        )
    by_key = Window.partitionBy("run", "key").orderBy("seq")
    return changes.drop("rate_limit", "tenant_rate_limit").withColumn(
        "until", F.lead("seq").over(by_key)
    )


def switches(transitions: DataFrame) -> DataFrame:
    """Return ``run`` and ``key`` of what was not noted all the time, and when.

    ``dark``: an array of the first and last numbers of those times.
    A queue's first settings that are not its version 1 say that it was there before its journal was; settings without a
    journal that it is not noted from there on, unless it plainly is; and a version that is missing, that it was not.
    """
    by_key = Window.partitionBy("run", "key").orderBy("seq")
    changes = (
        settings(transitions)
        .withColumn("was", F.lag("seq").over(by_key))
        .withColumn("was_version", F.coalesce(F.lag("version").over(by_key), F.lit(0)))
        .withColumn("was_on", F.coalesce(F.lag("journal").over(by_key), F.expr("true")))
    )
    noted = (
        transitions.where(F.col("key").isNotNull())
        .groupBy("run", "key")
        .agg(F.max("seq").alias("latest"))
    )
    opened = (F.col("version") > F.col("was_version") + 1) | (~F.col("was_on") & F.col("journal"))
    closed = ~F.col("journal") & F.col("until").isNull() & (F.col("seq") == F.col("latest"))
    dark = F.array_compact(
        F.array(
            F.when(opened, _span(F.coalesce("was", F.lit(-1)) + 1, F.col("seq") - 1)),
            F.when(closed, _span(F.col("seq") + 1, F.lit(_EVER - 1))),
        )
    )
    return (
        changes.join(noted, ["run", "key"])
        .select("run", "key", F.explode(dark).alias("one"))
        .where(F.col("one.last") >= F.col("one.first"))
        .groupBy("run", "key")
        .agg(F.sort_array(F.collect_list("one")).alias("dark"))
    )


def _span(first: Column, last: Column) -> Column:
    return F.struct(first.cast("long").alias("first"), last.cast("long").alias("last"))


def _seconds(unit: Column) -> Column:
    pairs = [F.lit(part) for one in IntervalUnit for part in (one.value, float(one.seconds))]
    return F.create_map(*pairs)[unit]
