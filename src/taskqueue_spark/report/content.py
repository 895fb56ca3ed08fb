"""What a report tells, taken from the tables: as much as a page has room for, in plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from taskqueue_spark.pipeline.audit import ANOMALIES
from taskqueue_spark.pipeline.durations import steps
from taskqueue_spark.pipeline.tables import first_rows
from taskqueue_spark.report.build import ReportBuild
from taskqueue_spark.report.verdict import COUNTED, LIVE, Verdict, verdict_of

_MOST = 200
"""rows of a table in the report"""
_KEYS = 8
"""queues that are told over time, the busiest"""
_POINTS = 80
"""of a plot"""
_LENGTHS = (
    0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400,
)  # fmt: skip
"""seconds that a person reads off an axis"""
_DAY = 86_400
_BEGINS = ("published", "redriven", "discarded")
"""what follows on no live state"""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """From when to when, and how much."""

    since: datetime | None
    until: datetime | None
    transitions: int
    runs: int
    workers: int

    @property
    def seconds(self) -> float:
        """How long that is."""
        if self.since is None or self.until is None:
            return 0.0
        return (self.until - self.since).total_seconds()


class AuditContent(msgspec.Struct, frozen=True, kw_only=True):
    """What was audited."""

    total: dict[str, Any]
    """over all queues: ``queues``, what is counted of them, and whether all are ``balanced`` and ``complete``"""
    conservation: list[dict[str, Any]]
    """of some queues: first those that are not as they must be, then the busiest"""
    anomalies: dict[str, int]
    lost: list[dict[str, Any]]
    """some of the lost tasks"""
    gaps: list[dict[str, Any]]
    missing: int
    damaged: int
    asked: bool
    """whether the store was asked"""
    ledgers: list[dict[str, Any]] = []
    short: int = 0
    """how many tasks fewer the ledgers have as published than the journal has"""

    def verdict(self, rules: Iterable[Mapping[str, Any]] = ()) -> Verdict:
        """Return what it comes to."""
        return verdict_of(
            self.total,
            rules=rules,
            anomalies=self.anomalies,
            gaps=self.missing,
            damaged=self.damaged,
            store_checked=self.asked,
            short=self.short,
        )


def length_of(seconds: float, points: int = _POINTS, *, least: float = 0) -> float:
    """Return a length of windows, so that they are not more than so many."""
    for length in _LENGTHS:
        if length >= least and seconds / length <= points:
            return length
    return _DAY * -(-seconds // (points * _DAY))


def extent(transitions: DataFrame) -> Extent:
    """Look how much there is of tasks, and of when."""
    rows = transitions.where(F.col("task_id") != "")
    result = rows.agg(
        F.min("ts").alias("since"),
        F.max("ts").alias("until"),
        F.count("*").alias("transitions"),
        F.count_distinct("run").alias("runs"),
        F.count_distinct("worker").alias("workers"),
    )
    return Extent(**_only_row(result))


def audit_content(build: ReportBuild, damaged: int) -> AuditContent:
    """Audit, and take what a verdict is made of."""
    table = build.table("conservation")
    total = _only_row(
        table.agg(
            F.count("*").alias("queues"),
            *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in COUNTED),
            *(F.coalesce(F.bool_and(name), F.expr("true")).alias(name) for name in ("balanced", "complete")),
        )
    )  # fmt: skip
    wrong = (F.col("lost") > 0) | ~F.col("balanced")
    shown = _rows(table.withColumn("wrong", wrong), "-wrong", "-published", "key")
    conservation = [{name: row[name] for name in table.columns} for row in shown]
    odd = (
        build.table("audit")
        .select(F.explode("anomalies").alias("name"))
        .groupBy("name")
        .agg(F.count("*").alias("count"))
    )
    counts = {row["name"]: row["count"] for row in odd.toArrow().to_pylist()}
    lost = build.table("audit").where(F.col("verdict") == "lost")
    gaps = build.table("gaps")
    missing = gaps.agg(F.coalesce(F.sum("missing"), F.lit(0)).alias("missing"))
    store = build.wishes.store is not None
    return AuditContent(
        total=total,
        conservation=conservation,
        anomalies={name: counts.get(name, 0) for name in ANOMALIES},
        lost=_rows(
            lost.select("key", "task_id", "life", "reason", "last_event", "last_at"),
            "key",
            "task_id",
            most=20,
        ),
        gaps=_rows(gaps, "run", "shard", "first", most=20),
        missing=_only_row(missing)["missing"],
        damaged=damaged,
        asked=store,
        ledgers=_rows(build.table("ledgers"), "more_published", "key") if store else [],
        short=_short(build) if store else 0,
    )


def _short(build: ReportBuild) -> int:
    less = F.sum(F.greatest(-F.col("more_published"), F.lit(0)))
    short: int = _only_row(build.table("ledgers").agg(F.coalesce(less, F.lit(0)).alias("short")))[
        "short"
    ]
    return short


def report_content(
    build: ReportBuild, damaged: int, source: str, where: str = ""
) -> dict[str, Any]:
    """Return the report: every value is text, a number, a time, a list or a mapping.

    ``source``: what it is from, in words; ``where``: the same as options of a command.
    """
    result = extent(build.select(build.transitions))
    account = audit_content(build, damaged)
    rules = sorted(_rows(build.table("rules")), key=lambda row: int(row["rule"].strip("R") or 0))
    throughput = _rows(_whole(build.table("throughput")), "-published", "key")
    keys = [row["key"] for row in throughput[:_KEYS]]
    return {
        "report": 1,
        "made_at": datetime.now(UTC),
        "source": source,
        "where": where,
        "verdict": msgspec.to_builtins(account.verdict(rules)),
        "extent": msgspec.structs.asdict(result) | {"seconds": result.seconds},
        "account": msgspec.structs.asdict(account),
        "rules": rules,
        "violations": _rows(build.table("violations"), "rule", "key", "seq", most=50),
        "figures": _headline_metrics(build),
        "flow": _flow(build, result, keys),
        "throughput": throughput,
        "latency": _rows(_whole(build.table("latency")), "-tasks", "key"),
        "latency_over_time": _over_time(build.table("latency"), keys),
        "window": build.wishes.window,
        "classes": _rows(build.table("classes"), "-tasks", "key", "priority", "tenant", most=60),
        "concurrency": _concurrency(build),
        "fairness": _rows(build.table("fairness"), "-deliveries", "key", "by"),
        "failures": _rows(build.table("failures"), "-attempts", "key", "fingerprint", most=50),
        "capacity": _rows(build.table("capacity"), "key"),
        "target": {"wait": build.wishes.target_wait, "percentile": build.wishes.percentile},
    }  # fmt: skip


def _headline_metrics(build: ReportBuild) -> dict[str, Any]:
    """Return what is told at first sight, over all queues."""
    latency = _whole(build.table("latency")).agg(
        F.coalesce(F.sum("executions"), F.lit(0)).alias("executions"),
        F.max("queue_wait_p95").alias("wait_p95"),
        F.max("run_p95").alias("run_p95"),
    )
    again = F.sum(F.col("lost") + F.col("redelivered"))
    throughput = _whole(build.table("throughput")).agg(F.coalesce(again, F.lit(0)).alias("again"))
    failed = build.table("failures").agg(F.coalesce(F.sum("attempts"), F.lit(0)).alias("failed"))
    peak = _of_queues(build).agg(F.coalesce(F.max("peak"), F.lit(0)).alias("peak"))
    return _only_row(latency.crossJoin(throughput).crossJoin(failed).crossJoin(peak))


def _concurrency(build: ReportBuild) -> list[dict[str, Any]]:
    """Return what is told of queues, and then of workers: neither takes the other's place."""
    workers = build.table("concurrency").where("worker is not null")
    return [
        *_rows(_of_queues(build), "-executions", "key"),
        *_rows(workers, "-executions", "key", "worker"),
    ]


def _of_queues(build: ReportBuild) -> DataFrame:
    return build.table("concurrency").where("worker is null")


def _flow(build: ReportBuild, result: Extent, keys: Sequence[str]) -> dict[str, Any]:
    """Return per window how many came and went, over all queues and for the busiest."""
    if result.since is None:
        return {"seconds": 1.0, "start": None, "windows": 0, "all": _series({}, 0), "keys": []}
    length = length_of(result.seconds)
    origin = result.since.timestamp() // length * length
    position = F.floor((F.unix_micros("ts") / 1e6 - origin) / length).cast("int")
    event, before = F.col("event"), F.col("before_state")
    # A task that is first seen later than its beginning was there already.
    was = F.coalesce(before.isin(*LIVE), ~event.isin(*_BEGINS))
    counted = (
        build.select(steps(build.transitions))
        .groupBy(
            F.when(F.col("key").isin(*keys), F.col("key")).alias("key"), position.alias("place")
        )
        .agg(
            F.count_if(event == "published").alias("published"),
            F.count_if(event == "acked").alias("completed"),
            F.count_if(event.isin("retried", "dead_lettered")).alias("failed"),
            F.count_if(event.isin("lost", "redelivered")).alias("redelivered"),
            (F.count_if(F.col("state").isin(*LIVE)) - F.count_if(was)).alias("change"),
            F.count_if(before.isNull() & was).alias("earlier"),
        )
    )
    rows = counted.toArrow().to_pylist()
    windows = max((row["place"] for row in rows), default=0) + 1
    by_key = {
        key: {row["place"]: row for row in rows if row["key"] == key} for key in [*keys, None]
    }
    total: dict[int, dict[str, Any]] = {}
    for series in by_key.values():
        for at, row in series.items():
            into = total.setdefault(at, dict.fromkeys(_SERIES, 0))
            for name in _SERIES:
                into[name] += row[name]
    return {
        "seconds": length,
        "start": datetime.fromtimestamp(origin, UTC),
        "windows": windows,
        "all": _series(total, windows),
        "keys": [{"key": key} | _series(by_key[key], windows) for key in keys],
    }


_SERIES = ("published", "completed", "failed", "redelivered", "change", "earlier")


def _series(rows: Mapping[int, Mapping[str, Any]], windows: int) -> dict[str, list[int]]:
    """Return a list per name with a value for each window, and the backlog at the end of each."""
    fields = {name: [int(rows.get(n, {}).get(name, 0)) for n in range(windows)] for name in _SERIES}
    level = sum(fields.pop("earlier"))
    return fields | {"backlog": [level := level + change for change in fields.pop("change")]}


def _whole(frame: DataFrame) -> DataFrame:
    return frame.where(F.col("window_start").isNull())


def _over_time(frame: DataFrame, keys: Sequence[str]) -> list[dict[str, Any]]:
    names = (
        "queue_wait_p50",
        "queue_wait_p95",
        "queue_wait_p99",
        "run_p50",
        "run_p95",
        "run_p99",
        "end_to_end_p95",
    )
    rows = frame.where(F.col("window_start").isNotNull() & F.col("key").isin(*keys))
    return _rows(
        rows.select("key", "window_start", "tasks", *names),
        "key",
        "window_start",
        most=_POINTS * _KEYS,
    )


def _only_row(frame: DataFrame) -> dict[str, Any]:
    """Return the one row that there is."""
    row: dict[str, Any] = frame.toArrow().to_pylist()[0]
    return row


def _rows(frame: DataFrame, *order: str, most: int = _MOST) -> list[dict[str, Any]]:
    return first_rows(frame, *order, most=most)
