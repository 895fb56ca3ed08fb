"""The content of a report: rows of the tables that fit on a page, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_spark.columns import MISSING
from taskqueue_spark.pipeline.audit import ANOMALIES
from taskqueue_spark.pipeline.digests import DigestCheck, check_digests
from taskqueue_spark.pipeline.durations import steps
from taskqueue_spark.pipeline.tables import first_rows
from taskqueue_spark.report.build import ReportBuild
from taskqueue_spark.report.numbers import STEPS
from taskqueue_spark.report.outcome import COUNTED, LIVE, Outcome, outcome_of

_MOST = 200
"""maximum number of rows of a table in the report, unless the table has its own maximum"""
_KEYS = 8
"""maximum number of queues for which values over time are shown; the busiest are chosen"""
_POINTS = 80
"""maximum number of points of one plot"""
_DAY = 86_400
_BEGINS = ("published", "redriven", "discarded")
"""events before which a task is not live"""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """The time span of the transitions, and how many transitions, runs and workers it has."""

    since: datetime | None
    until: datetime | None
    transitions: int
    runs: int
    workers: int

    @property
    def seconds(self) -> float:
        """The length of the time span in seconds."""
        if self.since is None or self.until is None:
            return 0.0
        return (self.until - self.since).total_seconds()


class AuditContent(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the audit."""

    total: dict[str, Any]
    """totals of all queues: the number of ``queues``, the counts, and whether all are ``balanced`` and ``complete``"""
    conservation: list[dict[str, Any]]
    """rows of the conservation table, at most `_MOST`: first the queues with a fault, then the busiest queues"""
    anomalies: dict[str, int]
    lost: list[dict[str, Any]]
    """the first 20 lost tasks, ordered by key and id"""
    gaps: list[dict[str, Any]]
    missing: int
    damaged: int
    contradictions: list[dict[str, Any]]
    """the first 20 numbers that are shared by transitions with different content"""
    contradictory: int
    """number of all these numbers"""
    digests: DigestCheck | None
    """result of the check of the digests; ``None`` if the journal has none"""
    readable: bool
    """whether at least one transition of the journal can be read"""
    asked: bool
    """whether the store was queried"""
    ledgers: list[dict[str, Any]] = []
    short: int = 0
    """number of published tasks in the journal that the ledgers of the store do not have"""

    def outcome(self, rules: Iterable[Mapping[str, Any]] = ()) -> Outcome:
        """Return the outcome of all checks. ``rules``: each rule with its ``count`` of violations."""
        return outcome_of(
            self.total,
            rules=rules,
            anomalies=self.anomalies,
            gaps=self.missing,
            damaged=self.damaged,
            contradictory=self.contradictory,
            readable=self.readable,
            altered=self.digests.altered if self.digests else 0,
            unfinished=self.digests.unfinished if self.digests else 0,
            store_checked=self.asked,
            short=self.short,
        )


def length_of(seconds: float, points: int = _POINTS, *, least: float = 0.05) -> float:
    """Return a readable window length, at least ``least``, with which at most ``points`` windows cover ``seconds``."""
    fitting = (step for step in STEPS if step >= least and seconds / step <= points)
    return next(fitting, _DAY * -(-seconds // (points * _DAY)))


def extent(transitions: DataFrame) -> Extent:
    """Return the time span and size of the transitions that concern tasks."""
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
    """Run the audit, and return its results. ``damaged``: number of damaged entries of the journal."""
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
    odd = build.table("audit").selectExpr("explode(anomalies) as name").groupBy("name").count()
    counts = {row["name"]: row["count"] for row in odd.toArrow().to_pylist()}
    lost = build.table("audit").where(F.col("verdict") == "lost")
    columns = ("key", "task_id", "life", "reason", "last_event", "last_at")
    gaps, doubtful = build.table("gaps"), build.table("contradictions")
    ledgers = build.table("ledgers") if build.wishes.store is not None else None
    return AuditContent(
        total=total,
        conservation=conservation,
        anomalies={name: counts.get(name, 0) for name in ANOMALIES},
        lost=_rows(lost.select(*columns), "key", "task_id", most=20),
        gaps=_rows(gaps, "run", "shard", "first", most=20),
        missing=_sum(gaps, "missing"),
        damaged=damaged,
        contradictions=_rows(doubtful, "run", "shard", "seq", most=20),
        contradictory=doubtful.count(),
        digests=check_digests(build.transitions),
        readable=bool(total["queues"]) or is_readable(build.transitions),
        asked=ledgers is not None,
        ledgers=_rows(ledgers, "more_published", "key") if ledgers is not None else [],
        short=_sum(ledgers, "greatest(-more_published, 0)") if ledgers is not None else 0,
    )


def is_readable(transitions: DataFrame) -> bool:
    """Return whether at least one transition of a journal can be read."""
    return not transitions.where(F.col("event") != MISSING).isEmpty()


def report_content(
    build: ReportBuild,
    damaged: int,
    source: str,
    where: str = "",
) -> dict[str, Any]:
    """Return the content of the report. Every value is text, a number, a time, a list or a mapping.

    ``source``: the source of the transitions, as text; ``where``: the source as options of ``taskqueue pipeline``.
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
        "verdict": msgspec.to_builtins(account.outcome(rules)),
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
    """Return the rows of queues, then the rows of workers, at most `_MOST` of each."""
    workers = build.table("concurrency").where("worker is not null")
    return [
        *_rows(_of_queues(build), "-executions", "key"),
        *_rows(workers, "-executions", "key", "worker"),
    ]


def _of_queues(build: ReportBuild) -> DataFrame:
    return build.table("concurrency").where("worker is null")


def _flow(build: ReportBuild, result: Extent, keys: Sequence[str]) -> dict[str, Any]:
    """Return the counts of events and the backlog per window, in total and for each of the busiest queues."""
    if result.since is None:
        return {"seconds": 1.0, "start": None, "windows": 0, "all": _series({}, 0), "keys": []}
    length = length_of(result.seconds)
    origin = result.since.timestamp() // length * length
    position = F.floor((F.unix_micros("ts") / 1e6 - origin) / length).cast("int")
    event, before = F.col("event"), F.col("before_state")
    # If the first recorded event of a task is not in `_BEGINS`, the task was live before.
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
    by_key = {key: {row["place"]: row for row in rows if row["key"] == key} for key in keys}
    total: dict[int, dict[str, Any]] = {}
    for row in rows:
        into = total.setdefault(row["place"], dict.fromkeys(_SERIES, 0))
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
    """Return a list with one value per window for each name, and the backlog at the end of each window."""
    fields = {name: [int(rows.get(n, {}).get(name, 0)) for n in range(windows)] for name in _SERIES}
    level = sum(fields.pop("earlier"))
    return fields | {"backlog": [level := level + change for change in fields.pop("change")]}


def _whole(frame: DataFrame) -> DataFrame:
    return frame.where(F.col("window_start").isNull())


def _over_time(frame: DataFrame, keys: Sequence[str]) -> list[dict[str, Any]]:
    kinds = [f"{kind}_{name}" for kind in ("queue_wait", "run") for name in ("p50", "p95", "p99")]
    rows = frame.where(F.col("window_start").isNotNull() & F.col("key").isin(*keys))
    rows = rows.select("key", "window_start", "tasks", *kinds, "end_to_end_p95")
    return _rows(rows, "key", "window_start", most=_POINTS * _KEYS)


def _sum(frame: DataFrame, expression: str) -> int:
    total: int = _only_row(frame.selectExpr(f"coalesce(sum({expression}), 0) as total"))["total"]
    return total


def _only_row(frame: DataFrame) -> dict[str, Any]:
    row: dict[str, Any] = frame.toArrow().to_pylist()[0]
    return row


def _rows(frame: DataFrame, *order: str, most: int = _MOST) -> list[dict[str, Any]]:
    return first_rows(frame, *order, most=most)
