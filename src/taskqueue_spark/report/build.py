"""The tables of the pipeline. Each is written when it is created, and read back for the tables that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's documentation uses the name F

from taskqueue_spark.batch_reader import read_journal
from taskqueue_spark.pipeline import tables
from taskqueue_spark.pipeline.audit import against, audit, conservation
from taskqueue_spark.pipeline.capacity import advice, check_target
from taskqueue_spark.pipeline.durations import seconds_of
from taskqueue_spark.pipeline.failures import failures
from taskqueue_spark.pipeline.fairness import fairness
from taskqueue_spark.pipeline.gaps import contradictions, gaps
from taskqueue_spark.pipeline.history import counts, violations
from taskqueue_spark.pipeline.latency import latency
from taskqueue_spark.pipeline.throughput import concurrency, throughput
from taskqueue_spark.report.outcome import LIVE
from taskqueue_spark.store_tables import ledgers, live_states

_THERE = (*LIVE, "dead_lettered", "unknown")
"""verdicts of tasks that should or may still be in the store"""
_CHUNK = 8
"""maximum number of Spark tasks that query the store at the same time, to limit the load on the store"""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters for creating the tables. Raises `InvalidInput`."""

    window: str = "1 minute"
    """length of the windows, for tables with values over time"""
    target_wait: float = 1.0
    percentile: float = 0.95
    grace: float = 60.0
    whole: bool = True
    """whether the transitions are all those of their runs, not only those of some keys or events"""
    store: dict[str, str] | None = None
    """options with which to query the store for its current content; ``None``: do not query it"""
    behind: dict[str, str] | None = None
    """options of the data source for the part of the journal after the transitions; ``None`` if there is none"""

    def __post_init__(self) -> None:
        seconds_of(self.window)
        check_target(self.target_wait, self.percentile)


class ReportBuild:
    """Builds tables in a folder from transitions. ``own`` takes a table, and returns its rows of the chosen queues."""

    def __init__(
        self,
        transitions: DataFrame,
        out: Path,
        wishes: Wishes,
        own: Callable[[DataFrame], DataFrame] = lambda frame: frame,
    ) -> None:
        self.transitions = transitions
        self.out = out
        self.wishes = wishes
        self.select = own
        self.made: dict[str, DataFrame] = {}

    def table(self, name: str) -> DataFrame:
        """Return a table by its name. Create and write it on the first call."""
        if name not in self.made:
            self.made[name] = tables.write(self.select(TABLES[name](self)), self.out, name)
        return self.made[name]

    def all(self, stage: Callable[[str], AbstractContextManager[Any]]) -> Mapping[str, DataFrame]:
        """Create all tables. If the store is not to be queried, leave out the tables that query it.

        Each table is created in the context that ``stage`` returns for its name. The ``note`` of the context is set to
        the number of rows.
        """
        for name in TABLES:
            if self.wishes.store is None and name in {"asked", "live", "ledgers"}:
                continue
            with stage(name.replace("_", " ")) as shown:
                self.table(name)
                rows = tables.rows(self.out, name)
                shown.note = f"{rows:,} row{'' if rows == 1 else 's'}"
        return self.made


def audited(build: ReportBuild) -> DataFrame:
    """Return the audit. If the store is to be queried, it includes the current states of unfinished tasks."""
    grace = build.wishes.grace
    if build.wishes.store is None:
        return audit(build.transitions, grace_seconds=grace)
    return audit(build.transitions, live=build.table("live"), grace_seconds=grace)


def _live_states_of(build: ReportBuild) -> DataFrame:
    result = audit(build.transitions).where(F.col("verdict").isin(*_THERE))
    ids = result.select("key", "task_id").distinct().coalesce(_CHUNK)
    return live_states(ids, **build.wishes.store or {})


def _live(build: ReportBuild) -> DataFrame:
    """Return the states from the store, and for tasks that the store does not have, the later states in the journal.

    The store may have forgotten a task that ended after the last of the transitions. The end of the task is then in the
    later part of the journal. If it is not found there, and that part has gaps, the state is ``unknown``.
    """
    requested = build.table("asked")
    absent = requested.where("state is null").select("key", "task_id")
    if build.wishes.behind is None or absent.isEmpty():
        return requested
    later = read_journal(requested.sparkSession, build.wishes.behind)
    noted = later.join(absent, ["key", "task_id"], "left_semi").groupBy("key", "task_id")
    result = requested.join(
        noted.agg(F.max_by("state", "seq").alias("noted")), ["key", "task_id"], "left"
    )
    default = F.lit("unknown" if _has_gaps(build.transitions, later) else None)
    return result.withColumn("state", F.coalesce("state", "noted", default)).drop("noted")


def _has_gaps(transitions: DataFrame, later: DataFrame) -> bool:
    """Return whether a number is missing between the last one in ``transitions`` and the last one in ``later``."""
    ends = transitions.groupBy("run", "shard").agg(F.max("seq").alias("end"))
    counts = (
        later.where("event != 'damaged'")
        .groupBy("run", "shard")
        .agg(F.max("seq").alias("last"), F.count_distinct("seq").alias("there"))
        .join(ends, ["run", "shard"], "left")
    )
    return not counts.where("last - coalesce(end, 0) > there").isEmpty()


def _ledgers(build: ReportBuild) -> DataFrame:
    stored = ledgers(build.transitions.sparkSession, **build.wishes.store or {})
    result = against(build.table("conservation"), stored)
    # Leave out queues that the audit does not know, because they have no journal. Show queues without a ledger.
    return result.where("coalesce(ledger_published != more_published, true)")


def _latency(build: ReportBuild) -> DataFrame:
    over_time = latency(build.transitions, build.wishes.window, by=())
    return latency(build.transitions, None, by=()).unionByName(over_time)


def _throughput(build: ReportBuild) -> DataFrame:
    over_time = throughput(build.transitions, build.wishes.window)
    return throughput(build.transitions, None).unionByName(over_time)


def _concurrency(build: ReportBuild) -> DataFrame:
    return concurrency(build.transitions).unionByName(concurrency(build.transitions, "worker"))


def _fairness(build: ReportBuild) -> DataFrame:
    kinds = [
        fairness(build.transitions, by, build.wishes.window).select(F.lit(by).alias("by"), "*")
        for by in ("tenant", "worker")
    ]
    return kinds[0].unionByName(kinds[1])


def _capacity(build: ReportBuild) -> DataFrame:
    wishes = build.wishes
    return advice(build.transitions, wishes.target_wait, wishes.percentile, whole=wishes.whole)


TABLES: dict[str, Callable[[ReportBuild], DataFrame]] = {
    "asked": _live_states_of,
    "live": _live,
    "audit": audited,
    "conservation": lambda build: conservation(build.table("audit")),
    "ledgers": _ledgers,
    "gaps": lambda build: gaps(build.transitions),
    "contradictions": lambda build: contradictions(build.transitions),
    "violations": lambda build: violations(build.transitions, build.table("audit")),
    "rules": lambda build: counts(build.table("violations")),
    "throughput": _throughput,
    "concurrency": _concurrency,
    "latency": _latency,
    "classes": lambda build: latency(build.transitions, None),
    "fairness": _fairness,
    "failures": lambda build: failures(build.transitions),
    "capacity": _capacity,
}
"""functions that create the tables, by the name of the table; a table comes after those that it depends on"""
