"""Capacity recommendations: how many slots a key needs so that its tasks meet a target wait.

The recorded arrivals, each with the time for which it occupied a slot, are replayed with different numbers of slots.
Unlike a formula, a replay reproduces bursts, busy hours, priorities and long tails; the result of a formula is
included for comparison. The forecast holds as long as arrivals and running times stay the same; if they already change
within the recording, there is a reason instead of a recommendation.

The replay assumes one queue per key, ordered by priority and then by arrival. Waits due to tenant limits, ordering
keys, rate limits and pauses are not in the forecast, because more slots do not shorten them.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.durations import steps
from taskqueue_spark.pipeline.forecast import advise

SAMPLE = 50_000
"""maximum number of deliveries of a key that are replayed, from its busiest time"""
LEAST = 200
"""minimum number of deliveries for a recommendation"""
_BEYOND = 10
"""minimum number of deliveries above a percentile, so that the percentile is not due to chance"""
_INCOMPLETE = 0.05
"""maximum share of a key's history that may be missing for a recommendation"""
_MICROS = 1e6
_REPLAYED = (
    "sampled bigint, sampled_from timestamp, sampled_to timestamp, arrival_rate double, arrival_scv double, "
    "service_mean double, service_scv double, load double, overhead double, slots int, max_inflight int, "
    "utilisation double, peak_utilisation double, expected_wait double, expected_low double, expected_high double, "
    "formula_wait double, backlog bigint, rate_limit double, burst bigint, max_tokens bigint, interval int, "
    "slots_per_worker int, workers int, workers_seen int"
)
_FOUND = f"key string, {_REPLAYED}, unreachable string"
ADVICE = (
    "key string, target_wait double, percentile double, deliveries bigint, peak_rate double, "
    f"{_REPLAYED}, reason string"
)
"""the columns of the result of `advice`"""
_TYPES = {
    "bigint": pa.int64(), "int": pa.int32(), "double": pa.float64(), "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
}  # fmt: skip
_SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in map(str.split, _FOUND.split(", "))])


def advice(
    transitions: DataFrame,
    target_wait: float = 1.0,
    percentile: float = 0.95,
    *,
    whole: bool = True,
    sample: int = SAMPLE,
) -> DataFrame:
    """Return a row per key: the fewest slots with which a share ``percentile`` of tasks waits at most ``target_wait``.

    If there is no recommendation, ``reason`` says why. The section "Tables" of docs/pipeline.md describes the columns.

    ``whole``: whether ``transitions`` has all transitions of its runs, so that a number without a row means missing
    history; ``False`` for transitions that were selected by key or event. ``sample``: maximum number of deliveries of a
    key that are replayed, from its busiest time. Raises `InvalidInput` for arguments out of range.
    """
    check_target(target_wait, percentile)
    if sample < LEAST:
        raise InvalidInput("sample", kind_of(sample), f"a whole number of at least {LEAST}")
    rows = _rows(transitions)
    needed = max(LEAST, math.ceil(_BEYOND / (1 - percentile)))
    about = _about(rows, sample)
    lost = F.broadcast(_missing(transitions)) if whole else None
    about = about.join(lost, "key", "left") if lost else about.withColumn("missing", F.lit(0.0))
    about = about.withColumn("reason", _reason(needed))

    def replayed(table: pa.Table) -> pa.Table:
        return _advised(table, target_wait=target_wait, percentile=percentile, sample=sample)

    # Broadcast the table of keys, because it has few rows.
    good = about.where("reason is null").select("key", "from", "to", "peak_rate")
    chosen = rows.where("ended is not null").join(F.broadcast(good), "key")
    advised = (
        chosen.where("second between `from` and `to`").groupBy("key").applyInArrow(replayed, _FOUND)
    )
    full = about.join(F.broadcast(advised), "key", "left").select(
        "*",
        F.lit(float(target_wait)).alias("target_wait"),
        F.lit(float(percentile)).alias("percentile"),
        F.coalesce("reason", "unreachable").alias("why"),
    )
    names = [column.split()[0] for column in ADVICE.split(", ")]
    return full.select(*(F.col("why" if name == "reason" else name).alias(name) for name in names))


def check_target(target_wait: float, percentile: float) -> None:
    """Raise `InvalidInput` if the target wait or the percentile is out of range."""
    if not 0 < target_wait < math.inf:
        raise InvalidInput("target_wait", kind_of(target_wait), "a number of seconds above 0")
    if not 0.5 <= percentile <= 0.999:  # noqa: PLR2004 - the message names the same numbers
        raise InvalidInput("percentile", kind_of(percentile), "a number from 0.5 to 0.999")


def _rows(transitions: DataFrame) -> DataFrame:
    """Return, for each delivery, when its task became available, when it was delivered, and when the delivery ended.

    Other transitions have nulls in these columns. They are included so that keys without deliveries have a row.
    """
    return (
        steps(transitions)
        .selectExpr(
            "key",
            "worker",
            "priority",
            "event = 'delivered' as delivered",
            "unix_micros(ts) - queue_wait as arrived",
            "if(event = 'delivered', unix_micros(ts), null) as started",
            "if(queue_wait is not null, unix_micros(after_ts), null) as ended",
        )
        .selectExpr("*", "arrived div 1000000 as second")
    )


def _about(rows: DataFrame, sample: int) -> DataFrame:
    """Return a row per key: its counts, its peak rate, and its busiest time.

    The busiest time is the shortest span of whole seconds with ``sample`` arrivals, or the whole recorded time if
    there are fewer arrivals.
    """
    counts = {
        "deliveries": "count_if(delivered)",
        "arrivals": "count(arrived)",
        "known": "count(ended)",
    }
    minute = "partition by key, second div 60"
    rank = f"struct(total >= {sample}, if(total >= {sample}, first - second, total), -second)"
    rank = f"if(second is not null, {rank}, null)"
    totals = {
        "deliveries": "sum(deliveries)",
        "known": "sum(known)",
        "unknown": "sum(deliveries) - sum(arrivals)",
        "peak_rate": "percentile(if(second is not null and place = 1, per_minute / 60.0D, null), 0.95D)",
        "from": f"max_by(first, {rank})",
        "to": f"max_by(second, {rank})",
    }
    return (
        rows.groupBy("key", "second")
        .agg(*(F.expr(text).alias(name) for name, text in counts.items()))
        .repartition("key")
        .selectExpr("*", "sum(known) over (partition by key order by second) as total")
        .selectExpr(
            "*",
            f"min(second) over (partition by key order by total range {sample - 1} preceding) as first",
            f"sum(arrivals) over ({minute}) as per_minute",
            f"row_number() over ({minute} order by second) as place",
        )
        .groupBy("key")
        .agg(*(F.expr(text).alias(name) for name, text in totals.items()))
    )


def _reason(needed: int) -> Column:
    """Return the reason why the data of a key is not sufficient for a recommendation; null if the data is."""
    return F.expr(f"""case
        when missing > {_INCOMPLETE}D then format_string('%.0f %% of the journal is missing', missing * 100)
        when unknown > {_INCOMPLETE}D * deliveries
            then format_string('%d of %d deliveries lack the time when the task became available', unknown, deliveries)
        when known < {needed}
            then format_string('deliveries known from start to end: %d; needed: {needed}', known) end""")


def _missing(transitions: DataFrame) -> DataFrame:
    """Return the share of missing transitions in the runs and shards of each key."""
    there = transitions.groupBy("run", "shard").agg(
        F.count("*").alias("there"), (F.max("seq") - F.min("seq") + 1).alias("numbers")
    )
    where = transitions.where("event = 'delivered'").select("key", "run", "shard").distinct()
    share = F.greatest(F.lit(0.0), 1.0 - F.sum("there") / F.sum("numbers"))
    return (
        where.join(F.broadcast(there), ["run", "shard"]).groupBy("key").agg(share.alias("missing"))
    )


def _advised(table: pa.Table, *, target_wait: float, percentile: float, sample: int) -> pa.Table:
    """Return the recommendation for one key, as a table with one row."""
    columns = {name: table[name].to_numpy() for name in ("arrived", "started", "ended", "priority")}
    order = np.lexsort((columns["started"], columns["arrived"]))[:sample]
    first = int(columns["arrived"][order[0]])
    times = {
        name: (columns[name][order] - first) / _MICROS for name in ("arrived", "started", "ended")
    }
    workers = table["worker"].combine_chunks().dictionary_encode()
    matches = advise(
        **times,
        priorities=columns["priority"][order].astype(np.int64),
        workers=workers.indices.fill_null(-1).to_numpy()[order],
        peak_rate=table["peak_rate"][0].as_py(),
        target_wait=target_wait,
        percentile=percentile,
    )
    last = first + int(times["arrived"][-1] * _MICROS)
    row = {"key": table["key"][0].as_py(), "sampled_from": first, "sampled_to": last, **matches}
    return pa.Table.from_pylist([row], schema=_SCHEMA)
