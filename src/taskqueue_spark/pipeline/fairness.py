"""Whether those who compete for a queue get their share: tenants of its deliveries, workers of its work."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as fn

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.durations import (
    MICROSECONDS,
    micros,
    run_ends,
    seconds_of,
    steps,
)

_BY = ("tenant", "worker")
_MOST_SHARES = 100
_LONGEST = 10_000
"""windows without an event of its own over which a member is followed: a clock that jumped must not make millions"""


def fairness(transitions: DataFrame, by: str = "tenant", window: str = "1 minute") -> DataFrame:
    """Return a row per key: how evenly its deliveries went to tenants, or to workers.

    Fairness means something only where members compete. A *tenant* competes in a window of time if tasks of
    his waited when it began and when it ended; all that wait count, also for a limit or an ordering key of
    their own. A *worker* competes in a window if the key had such a backlog, and the worker's first delivery
    of the key was before the window and its last one after. A window is *contended* if at least two competed
    in it, and they were given at least as many deliveries as they are.

    Jain's index of n members is (sum of x)² / (n * sum of x²), from 1/n (one has it all) to 1 (all the same),
    where x is a member's deliveries divided by the tenant's weight, as the queue's settings last told it (1
    where the journal has none of them). Columns:

    - ``windows`` that were contended; of these ``jain``, the mean of their indexes by deliveries,
      ``jain_lowest``, and ``shares`` of the deliveries that went to competing members: an array of (member,
      deliveries, share), the largest hundred first. Null (``shares``: empty) where there are none;
    - of everything, whether they competed or not: ``members``, ``deliveries``, ``jain_total``,
      ``shares_total``.

    A member without a name (no tenant, no worker told) is "". Raises `InvalidInput` for a member or a window
    that cannot be.
    """
    if by not in _BY:
        raise InvalidInput("by", kind_of(by), " or ".join(_BY))
    length = seconds_of(window) * MICROSECONDS
    rows = steps(transitions).join(fn.broadcast(run_ends(transitions)), "run", "left")
    changes = _of_workers(rows, length) if by == "worker" else _of_tenants(rows, length)
    windows = _windows_of(_weighed(_windows(changes), _weights(transitions), by), by)
    got, index, given = fn.col("got"), fn.col("index"), fn.col("given")
    members = windows.groupBy("key", "member").agg(
        fn.sum("served").alias("served"),
        fn.sum("got").alias("got"),
        fn.sum("given").alias("given"),
        fn.sum(index * given).alias("weighed"),
        fn.min("index").alias("lowest"),
        fn.count_if("counted").alias("windows"),
    )
    everybody = _shares("largest", "deliveries")
    jain = fn.try_divide(fn.sum("got") * fn.sum("got"), fn.count("*") * fn.sum(got * got))
    return (
        members.groupBy("key")
        .agg(
            fn.sum("windows").alias("windows"),
            fn.try_divide(fn.sum("weighed"), fn.sum("given")).alias("jain"),
            fn.min("lowest").alias("jain_lowest"),
            _largest("given").alias("rivals"),
            fn.sum("given").alias("all_given"),
            fn.count("*").alias("members"),
            fn.sum("served").alias("deliveries"),
            jain.alias("jain_total"),
            _largest("served").alias("largest"),
        )
        .select(
            "key",
            "windows",
            "jain",
            "jain_lowest",
            fn.coalesce(_shares("rivals", "all_given"), fn.slice(everybody, 1, 0)).alias("shares"),
            "members",
            "deliveries",
            "jain_total",
            everybody.alias("shares_total"),
        )
    )


def _of_tenants(rows: DataFrame, length: int) -> DataFrame:
    """Return per key, tenant and window how the number of those who wait changed, and the deliveries."""
    member = fn.coalesce("tenant", fn.lit(""))
    return _summed(rows, length, *_waiting(member), _change(member, micros("ts"), 0, _delivered()))


def _of_workers(rows: DataFrame, length: int) -> DataFrame:
    """Return the same of workers, who are there from the window of their first delivery to that of their last.

    How many wait for the key stands at a member null.
    """
    worker = fn.coalesce("worker", fn.lit(""))
    queue = _waiting(fn.lit(None).cast("string"))
    changes = _summed(rows, length, *queue, _change(worker, micros("ts"), 0, _delivered()))
    ends = Window.partitionBy("key", "member")
    position = fn.col("place")
    comes = fn.when(position == fn.min("place").over(ends), 1).otherwise(0)
    goes = fn.when(position == fn.max("place").over(ends), 1).otherwise(0)
    here = fn.when(fn.col("member").isNull(), fn.col("change")).otherwise(comes - goes)
    return changes.withColumn("change", here)


def _waiting(member: Column) -> tuple[Column, Column]:
    begin = micros("waiting_since")
    end = fn.greatest(begin, micros(fn.coalesce("after_ts", "heard_at")))
    waits = fn.when(fn.col("state") == "waiting", 1).otherwise(0)
    return _change(member, begin, waits, 0), _change(member, end, -waits, 0)


def _delivered() -> Column:
    return fn.when(fn.col("event") == "delivered", 1).otherwise(0)


def _change(member: Column, at: Column, change: Column | int, served: Column | int) -> Column:
    columns = {"member": member, "at": at, "change": fn.lit(change), "served": fn.lit(served)}
    return fn.struct(*(column.alias(name) for name, column in columns.items()))


def _summed(rows: DataFrame, length: int, *changes: Column) -> DataFrame:
    return (
        rows.where((fn.col("event") == "delivered") | (fn.col("state") == "waiting"))
        .select("key", fn.inline(fn.array(*changes)))
        .where((fn.col("change") != 0) | (fn.col("served") != 0))
        .groupBy("key", "member", fn.floor(fn.col("at") / length).alias("place"))
        .agg(fn.sum("change").alias("change"), fn.sum("served").alias("served"))
    )


def _windows(changes: DataFrame) -> DataFrame:
    """Return the windows of each member: place, served, and whether it was ``standing`` from end to end."""
    in_turn = Window.partitionBy("key", "member").orderBy("place")
    position, after = fn.col("place"), fn.col("after")
    so_far = fn.sum("change").over(in_turn.rowsBetween(Window.unboundedPreceding, 0))
    rows = changes.withColumns({"after": so_far, "next": fn.lead("place").over(in_turn)})
    # Where nothing happens to a member that stands, as when it starves, its windows are made here.
    last = fn.when(after > 0, fn.least(fn.col("next") - 1, position + _LONGEST)).otherwise(position)
    positions = fn.sequence(position, fn.coalesce(last, position))
    own = fn.col("nth") == 0
    return rows.select(
        "key", "member", "change", "after", "served", fn.posexplode(positions).alias("nth", "place")
    ).select(
        "key",
        "member",
        "place",
        fn.when(own, fn.col("served")).otherwise(0).alias("served"),
        ((after > 0) & (~own | (after > fn.col("change")))).alias("standing"),
    )


def _weights(transitions: DataFrame) -> DataFrame:
    """Return the weights of each key's tenants by its last settings."""
    settings = transitions.where(fn.col("event") == "configured").select(
        "key", "ts", "seq", "reason"
    )
    last = settings.groupBy("key").agg(
        fn.max_by("reason", fn.struct("ts", "seq")).alias("settings")
    )
    json_object = fn.from_json(fn.get_json_object("settings", "$.weights"), "map<string,double>")
    return last.select("key", json_object.alias("weights"))


def _weighed(windows: DataFrame, weights: DataFrame, by: str) -> DataFrame:
    """Add what each member got by its weight."""
    if by == "worker":
        return windows.withColumn("got", fn.col("served").cast("double"))
    weight = fn.coalesce(fn.try_element_at("weights", fn.col("member")), fn.lit(1.0))
    result = windows.join(fn.broadcast(weights), "key", "left")
    return result.withColumn("got", fn.col("served") / weight)


def _windows_of(windows: DataFrame, by: str) -> DataFrame:
    """Return the members' windows, and what contended ones add: ``given`` to the member, and the ``index``.

    ``counted`` is true once per contended window.
    """
    together = Window.partitionBy("key", "place")
    member, served = fn.col("member"), fn.col("served")
    rival = member.isNotNull() & fn.col("standing")
    if by == "worker":
        busy = fn.bool_or(fn.when(member.isNull(), fn.col("standing"))).over(together)
        rival &= fn.coalesce(busy, fn.lit(col=False))
    got = fn.when(fn.col("rival"), fn.col("got"))
    squares = fn.col("rivals") * fn.sum(got * got).over(together)
    rows = (
        windows.withColumn("rival", rival)
        .withColumn("rivals", fn.count_if("rival").over(together))
        .withColumns(
            {
                "all_given": fn.sum(fn.when(fn.col("rival"), served)).over(together),
                "index": fn.try_divide(fn.sum(got).over(together) ** 2, squares),
                "first": fn.min(fn.when(fn.col("rival"), member)).over(together),
            }
        )
        .where(member.isNotNull())
    )
    contended = (fn.col("rivals") > 1) & (fn.col("all_given") >= fn.col("rivals"))
    counts = fn.col("rival") & contended
    return rows.select(
        "key",
        "member",
        "served",
        "got",
        fn.when(counts, served).alias("given"),
        fn.when(counts, fn.col("index")).alias("index"),
        (counts & (member == fn.col("first"))).alias("counted"),
    )


def _largest(column: str) -> Column:
    """The members that have the most of something, of those that have it at all."""
    value = fn.col(column)
    order = fn.when(value.isNotNull(), fn.struct((-value).alias("most"), "member"))
    return fn.min_by(fn.struct("member", value.alias("deliveries")), order, _MOST_SHARES)


def _shares(largest: str, total: str) -> Column:
    """Add the share of the total to each of the largest."""
    return fn.transform(
        largest,
        lambda item: fn.struct(
            item["member"].alias("member"),
            item["deliveries"].alias("deliveries"),
            fn.try_divide(item["deliveries"], fn.col(total)).alias("share"),
        ),
    )
