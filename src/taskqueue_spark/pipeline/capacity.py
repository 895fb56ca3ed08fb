"""Capacity advice: how many slots a key needs so that its tasks wait no longer than they may.

What was recorded is replayed through fewer and more slots: the arrivals as they came, each with the time for which it
kept its slot. That keeps bursts, busy hours, priorities and long tails, which formulas smooth out; what a
formula says stands beside it for comparison. The forecast holds for as long as arrivals and times go on as they were.

The replay supposes one line per key, served by priority and then by arrival. Tenants' turns, ordering keys, rate limits
and pauses make single tasks wait for other reasons than a want of slots; such waits are not in the forecast.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own texts call it

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_core.tasks import State
from taskqueue_spark.pipeline.forecast import advise

SAMPLE = 50_000
"""deliveries of a key that are replayed at most: its busiest stretch"""
LEAST = 200
"""deliveries below which nothing is advised"""
_BEYOND = 10
"""deliveries that must wait longer than a percentile, so that it does not rest on chance alone"""
_INCOMPLETE = 0.05
"""the share of a key's history that may be unknown"""
_AVAILABLE = ("published", "available", "redelivered", "lost", "retried", "redriven")
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
"""the columns of `advice`"""
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
    """Return a row per key: the least number of slots with which so many tasks wait at most ``target_wait`` seconds.

    ``whole``: the transitions are all there is of their runs, so that a number without a row is history that is
    missing; say ``False`` of transitions that were chosen by key or event. ``sample``: how many deliveries of a key are
    replayed; of more, its busiest stretch is.

    Where ``reason`` is set, it says why there is no advice, and what was to be advised is null. Else:

    - ``arrival_rate`` (of what is replayed; of a burst: until it is done), ``peak_rate`` (95th percentile over the
      minutes in which tasks came), ``arrival_scv``; ``service_mean``, ``service_scv``: of the time from a hand-out to
      its end, whatever end; ``load``: slots that are busy on average; ``overhead``: what a task waits though there is
      room;
    - ``slots`` = ``max_inflight``, and what they lead to: ``utilisation``, ``peak_utilisation`` (above 1: the busiest
      minutes pile up work), ``expected_wait`` (the percentile asked for), in ``expected_low`` to ``expected_high``
      (what chance would make of it another time), ``formula_wait``, ``backlog`` (the most tasks that wait);
    - ``rate_limit``: hand-outs per second that the slots can do in the long run, more than ``arrival_rate``; with a
      ``burst`` of hand-outs at once it holds nothing up; ``max_tokens`` and ``interval`` (seconds) say the same as a
      queue's setting, which allows a burst of ``max_tokens``;
    - ``slots_per_worker``: the most that a worker has had of this key at once, ``workers``: how many such workers make
      up the slots, ``workers_seen``.

    Rates are per second, times in seconds. Raises `InvalidInput` for arguments out of range.
    """
    check_target(target_wait, percentile)
    if sample < LEAST:
        raise InvalidInput("sample", kind_of(sample), f"{LEAST} or more")
    rows = _rows(transitions)
    needed = max(LEAST, math.ceil(_BEYOND / (1 - percentile)))
    about = _about(rows, sample)
    lost = F.broadcast(_missing(transitions)) if whole else None
    about = about.join(lost, "key", "left") if lost else about.withColumn("missing", F.lit(0.0))
    about = about.withColumn("reason", _reason(needed))

    def replayed(table: pa.Table) -> pa.Table:
        return _advised(table, target_wait=target_wait, percentile=percentile, sample=sample)

    # Keys are few beside rows, so what is known of them goes to the rows.
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
    """Raise `InvalidInput` for what `advice` cannot be asked for."""
    if not 0 < target_wait < math.inf:
        raise InvalidInput("target_wait", kind_of(target_wait), "above 0, seconds")
    if not 0.5 <= percentile <= 0.999:  # noqa: PLR2004 - said right here
        raise InvalidInput("percentile", kind_of(percentile), "0.5 to 0.999")


def _rows(transitions: DataFrame) -> DataFrame:
    """Return for each hand-out when its entry had become available, when it was handed out, and when that ended.

    The other transitions are there too, with nulls: for keys of which nothing was handed out.
    """
    own = Window.partitionBy("key", "task_id", "run", "shard").orderBy("seq")
    before, time = F.lag("event").over(own), F.unix_micros("ts")
    # What was for later waits from its time on, whenever that was noticed.
    due = F.lag(F.unix_micros("due_at"), 2).over(own)
    since = F.lag(time).over(own)
    arrived = F.when((before == "available") & (due < since), due).otherwise(since)
    ready = before.isin(*_AVAILABLE) & (F.lag("state").over(own) == State.WAITING)
    again = F.col("seq").eqNullSafe(F.lag("seq").over(own))  # read twice, from a copied segment
    delivered = F.col("event") == "delivered"
    return (
        transitions.where(F.col("task_id") != "")
        .withColumn("again", again)
        .where("not again")
        .select(
            "key", "worker", "priority", delivered.alias("delivered"),
            F.when(delivered & ready, arrived).alias("arrived"),
            F.when(delivered, time).alias("started"),
            F.when(delivered & ready, F.lead(time).over(own)).alias("ended"),
        )
        .withColumn("second", F.expr("arrived div 1000000"))
    )  # fmt: skip


def _about(rows: DataFrame, sample: int) -> DataFrame:
    """Return a row per key: how much is known of it, its peak, and its busiest stretch.

    That is the shortest stretch of whole seconds with as many arrivals as the sample has, or all there is.
    """
    so_far = Window.partitionBy("key").orderBy("second")
    stretch = Window.partitionBy("key").orderBy("total").rangeBetween(1 - sample, 0)
    minute = Window.partitionBy("key", F.expr("second div 60"))
    seconds = (
        rows.groupBy("key", "second")
        .agg(
            F.count_if("delivered").alias("deliveries"),
            F.count("arrived").alias("arrivals"),
            F.count("ended").alias("known"),
        )
        .repartition("key")
        .withColumn("total", F.sum("known").over(so_far))
        .withColumn("first", F.min("second").over(stretch))
        .withColumn("per_minute", F.sum("arrivals").over(minute))
        .withColumn("place", F.row_number().over(minute.orderBy("second")))
    )
    enough, length = F.col("total") >= sample, F.col("second") - F.col("first")
    rank = F.struct(enough, F.when(enough, -length).otherwise(F.col("total")), -F.col("second"))
    there = F.col("second").isNotNull()
    peak = F.when(there & (F.col("place") == 1), F.col("per_minute") / 60.0)
    return seconds.groupBy("key").agg(
        F.sum("deliveries").alias("deliveries"),
        F.sum("known").alias("known"),
        (F.sum("deliveries") - F.sum("arrivals")).alias("unknown"),
        F.percentile(peak, F.lit(0.95)).alias("peak_rate"),
        F.max_by("first", F.when(there, rank)).alias("from"),
        F.max_by("second", F.when(there, rank)).alias("to"),
    )


def _reason(needed: int) -> Column:
    """Return why what is known of a key is not enough; null where it is."""
    unknown, deliveries, known = F.col("unknown"), F.col("deliveries"), F.col("known")
    return (
        F.when(
            F.col("missing") > _INCOMPLETE,
            F.format_string("%.0f %% of the journal are missing", F.col("missing") * 100),
        )
        .when(
            unknown > _INCOMPLETE * deliveries,
            F.format_string("%d of %d deliveries: when they became available is unknown", unknown, deliveries),
        )
        .when(
            known < needed,
            F.format_string(f"%d deliveries are known from start to end, {needed} are needed", known),
        )
    )  # fmt: skip


def _missing(transitions: DataFrame) -> DataFrame:
    """Return the share of transitions that are missing inside the runs and shards that a key was in."""
    there = transitions.groupBy("run", "shard").agg(
        F.count("*").alias("there"), (F.max("seq") - F.min("seq") + 1).alias("numbers")
    )
    where = transitions.where("event = 'delivered'").select("key", "run", "shard").distinct()
    share = F.greatest(F.lit(0.0), 1.0 - F.sum("there") / F.sum("numbers"))
    return (
        where.join(F.broadcast(there), ["run", "shard"]).groupBy("key").agg(share.alias("missing"))
    )


def _advised(table: pa.Table, *, target_wait: float, percentile: float, sample: int) -> pa.Table:
    """Return the advice for a key as a table of one row."""
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
