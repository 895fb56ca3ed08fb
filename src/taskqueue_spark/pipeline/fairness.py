"""Fairness: how evenly the deliveries of a queue are shared among its tenants, or among its workers."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as fn

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_spark.pipeline.durations import MICROSECONDS, run_ends, seconds_of, steps

_BY = ("tenant", "worker")
_MOST_SHARES = 100
_LONGEST = 10_000
"""maximum number of windows without an event in which a member still counts; a limit in case a clock jumps"""
_MEMBERS = {
    "served": "sum(served)", "got": "sum(got)", "given": "sum(given)", "weighed": "sum(index * given)",
    "lowest": "min(index)", "windows": "count_if(counted)",
}  # fmt: skip


def fairness(transitions: DataFrame, by: str = "tenant", window: str = "1 minute") -> DataFrame:
    """Return a row per key: how evenly its deliveries went to tenants, or to workers.

    Fairness is measured only while the members (tenants or workers) compete. A *tenant* competes in a window if tasks
    of the tenant waited when the window began and when it ended, even if they waited for a limit or an ordering key. A
    *worker* competes in a window if tasks of the key waited at both times, and the worker had deliveries of the key
    both before and after the window. A window is *contended* if at least two members competed in it, and together got
    at least one delivery per competing member.

    The section "Tables" of docs/pipeline.md describes the columns. Raises `InvalidInput` for an invalid ``by`` or
    window.
    """
    if by not in _BY:
        raise InvalidInput("by", kind_of(by), " or ".join(_BY))
    length = seconds_of(window) * MICROSECONDS
    rows = steps(transitions).join(fn.broadcast(run_ends(transitions)), "run", "left")
    if by == "worker":
        changes = _of_workers(rows, length)
    else:
        tenant = "coalesce(tenant, '')"
        changes = _summed(rows, length, *_waiting(tenant), _delivered(tenant))
    windows = _windows_of(_weighed(_windows(changes), _weights(transitions), by), by)
    members = windows.groupBy("key", "member").agg(
        *(fn.expr(text).alias(name) for name, text in _MEMBERS.items())
    )
    shares_total = _shares("largest", "deliveries")
    totals = {
        "windows": "sum(windows)",
        "jain": "try_divide(sum(weighed), sum(given))",
        "jain_lowest": "min(lowest)",
        "rivals": _largest("given"),
        "all_given": "sum(given)",
        "members": "count(*)",
        "deliveries": "sum(served)",
        "jain_total": "try_divide(sum(got) * sum(got), count(*) * sum(got * got))",
        "largest": _largest("served"),
    }
    return (
        members.groupBy("key")
        .agg(*(fn.expr(text).alias(name) for name, text in totals.items()))
        .selectExpr(
            "key",
            "windows",
            "jain",
            "jain_lowest",
            f"coalesce({_shares('rivals', 'all_given')}, slice({shares_total}, 1, 0)) as shares",
            "members",
            "deliveries",
            "jain_total",
            f"{shares_total} as shares_total",
        )
    )


def _of_workers(rows: DataFrame, length: int) -> DataFrame:
    """Return, per key, worker and window, the change in the worker's presence (1, 0 or -1), and the deliveries.

    A worker is present from the window of its first delivery to that of its last. Rows without a member contain the
    change in the number of waiting tasks of the key.
    """
    queue = _waiting("cast(null as string)")
    changes = _summed(rows, length, *queue, _delivered("coalesce(worker, '')"))
    ends = "over (partition by key, member)"
    present = f"if(place = min(place) {ends}, 1, 0) - if(place = max(place) {ends}, 1, 0)"
    return changes.withColumn("change", fn.expr(f"if(member is null, change, {present})"))


def _waiting(member: str) -> tuple[str, str]:
    begin, waits = "unix_micros(waiting_since)", "if(state = 'waiting', 1, 0)"
    end = f"greatest({begin}, unix_micros(coalesce(after_ts, heard_at)))"
    return _change(member, begin, waits, "0"), _change(member, end, f"-{waits}", "0")


def _delivered(member: str) -> str:
    return _change(member, "unix_micros(ts)", "0", "if(event = 'delivered', 1, 0)")


def _change(member: str, at: str, change: str, served: str) -> str:
    return f"struct({member} as member, {at} as at, {change} as change, {served} as served)"


def _summed(rows: DataFrame, length: int, *changes: str) -> DataFrame:
    """Return, per key, member and window, the change in the number of waiting tasks, and the deliveries."""
    return (
        rows.where("event = 'delivered' or state = 'waiting'")
        .selectExpr("key", f"inline(array({', '.join(changes)}))")
        .where("change != 0 or served != 0")
        .groupBy("key", "member", fn.expr(f"floor(at / {length})").alias("place"))
        .agg(fn.sum("change").alias("change"), fn.sum("served").alias("served"))
    )


def _windows(changes: DataFrame) -> DataFrame:
    """Return a row per member and window: ``place`` (the window), ``served`` (deliveries), and ``standing``.

    ``standing`` is true for a tenant that had waiting tasks when the window began and when it ended, and for a worker
    that had deliveries before and after the window. Such a member has a row even if it has no event in the window, for
    example because it receives no deliveries.
    """
    in_turn = "partition by key, member order by place"
    last = f"if(after > 0, least(next - 1, place + {_LONGEST}), place)"
    return (
        changes.selectExpr(
            "*",
            f"sum(change) over ({in_turn} rows unbounded preceding) as after",
            f"lead(place) over ({in_turn}) as next",
        )
        .selectExpr(
            "key", "member", "change", "after", "served",
            f"posexplode(sequence(place, coalesce({last}, place))) as (nth, place)",
        )
        .selectExpr(
            "key", "member", "place", "if(nth = 0, served, 0) as served",
            "after > 0 and (nth != 0 or after > change) as standing",
        )
    )  # fmt: skip


def _weights(transitions: DataFrame) -> DataFrame:
    """Return the weights of each key's tenants, from the last settings of the key."""
    weights = "from_json(get_json_object(settings, '$.weights'), 'map<string,double>') as weights"
    return (
        transitions.where("event = 'configured'")
        .groupBy("key")
        .agg(fn.expr("max_by(reason, struct(ts, seq)) as settings"))
        .selectExpr("key", weights)
    )


def _weighed(windows: DataFrame, weights: DataFrame, by: str) -> DataFrame:
    """Add the column ``got``: the deliveries of a member, divided by its weight."""
    if by == "worker":
        return windows.selectExpr("*", "cast(served as double) as got")
    result = windows.join(fn.broadcast(weights), "key", "left")
    return result.selectExpr("*", "served / coalesce(try_element_at(weights, member), 1.0D) as got")


def _windows_of(windows: DataFrame, by: str) -> DataFrame:
    """Return the windows of members, with ``given``, ``index`` and ``counted``.

    For a member that competes in a contended window, ``given`` is the number of its deliveries, and ``index`` is Jain's
    index of the window; otherwise both are null. ``counted`` is true for one member per contended window, so that each
    window can be counted once.
    """
    together = "over (partition by key, place)"
    rival = "member is not null and standing"
    if by == "worker":
        rival += f" and coalesce(bool_or(if(member is null, standing, null)) {together}, false)"
    got = "if(rival, got, null)"
    counts = "rival and rivals > 1 and all_given >= rivals"
    return (
        windows.selectExpr("*", f"{rival} as rival")
        .selectExpr("*", f"count_if(rival) {together} as rivals")
        .selectExpr(
            "*",
            f"sum(if(rival, served, null)) {together} as all_given",
            f"try_divide(power(sum({got}) {together}, 2), rivals * sum({got} * {got}) {together}) as index",
            f"min(if(rival, member, null)) {together} as first",
        )
        .where("member is not null")
        .selectExpr(
            "key",
            "member",
            "served",
            "got",
            f"if({counts}, served, null) as given",
            f"if({counts}, index, null) as index",
            f"coalesce({counts} and member = first, false) as counted",
        )
    )


def _largest(column: str) -> str:
    """Return an SQL expression for an array of the members with the highest values of a column, except nulls."""
    order = f"if({column} is not null, struct(-{column} as most, member), null)"
    return f"min_by(struct(member, {column} as deliveries), {order}, {_MOST_SHARES})"


def _shares(largest: str, total: str) -> str:
    """Return an SQL expression for the members in an array, with their shares of a total."""
    share = f"try_divide(item.deliveries, {total}) as share"
    return f"transform({largest}, item -> struct(item.member as member, item.deliveries as deliveries, {share}))"
