"""All tables of the pipeline, each written as it is made and read back for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from taskqueue_spark.batch_reader import read_journal
from taskqueue_spark.pipeline import tables
from taskqueue_spark.pipeline.audit import against, audit, conservation
from taskqueue_spark.pipeline.capacity import advice, check_target
from taskqueue_spark.pipeline.durations import seconds_of
from taskqueue_spark.pipeline.failures import failures
from taskqueue_spark.pipeline.fairness import fairness
from taskqueue_spark.pipeline.gaps import gaps
from taskqueue_spark.pipeline.history import counts, violations
from taskqueue_spark.pipeline.latency import latency
from taskqueue_spark.pipeline.throughput import concurrency, throughput
from taskqueue_spark.report.verdict import LIVE
from taskqueue_spark.store_tables import ledgers, live_states

_THERE = (*LIVE, "dead_lettered")
"""verdicts on what the store still has"""
_CHUNK = 8
"""tasks of Spark that ask the store at once: it has other work"""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What tables are made for. Raises `InvalidInput` for what no table can be made for."""

    window: str = "1 minute"
    """of what is shown over time"""
    target_wait: float = 1.0
    percentile: float = 0.95
    grace: float = 60.0
    whole: bool = True
    """whether the transitions are all there is of their runs, none of them chosen by key"""
    store: dict[str, str] | None = None
    """options by which the store is asked what it has now; none: it is not asked"""
    behind: dict[str, str] | None = None
    """options by which the journal behind the transitions is read; none: there is none"""

    def __post_init__(self) -> None:
        """Look at them now: some are needed late."""
        seconds_of(self.window)
        check_target(self.target_wait, self.percentile)


class _Note(Protocol):
    note: str


class ReportText(Protocol):
    """Who is told of each table."""

    def stage(self, name: str) -> AbstractContextManager[_Note]:
        """Tell that something is being done."""


class ReportBuild:
    """Makes tables of some transitions in a folder. ``select`` takes the rows of the queues that are wanted."""

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
        """Return a table, which is made and written unless it was."""
        if name not in self.made:
            self.made[name] = tables.write(self.select(TABLES[name](self)), self.out, name)
        return self.made[name]

    def all(self, telling: ReportText) -> Mapping[str, DataFrame]:
        """Make every table, in order."""
        for name in self._wanted():
            with telling.stage(name.replace("_", " ")) as stage:
                self.table(name)
                rows = tables.rows(self.out, name)
                stage.note = f"{rows:,} row{'' if rows == 1 else 's'}"
        return self.made

    def _wanted(self) -> Iterator[str]:
        requested = ("asked", "live", "ledgers")
        return (name for name in TABLES if self.wishes.store is not None or name not in requested)


def audited(build: ReportBuild) -> DataFrame:
    """Audit, and ask the store for the tasks that have no end, if it can be asked."""
    grace = build.wishes.grace
    if build.wishes.store is None:
        return audit(build.transitions, grace_seconds=grace)
    return audit(build.transitions, live=build.table("live"), grace_seconds=grace)


def _live_states_of(build: ReportBuild) -> DataFrame:
    result = audit(build.transitions).where(F.col("verdict").isin(*_THERE))
    ids = result.select("key", "task_id").distinct().coalesce(_CHUNK)
    return live_states(ids, **build.wishes.store or {})


def _live(build: ReportBuild) -> DataFrame:
    """Return what the store said; of what it did not have any more, what the journal has noted in the meantime.

    A task that ended behind the transitions may be forgotten before it is asked for. Where that part of the journal has
    holes already, nobody knows: ``unknown``.
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
    nobody_knows = F.lit("unknown" if _cut(build.transitions, later) else None)
    return result.withColumn("state", F.coalesce("state", "noted", nobody_knows)).drop("noted")


def _cut(transitions: DataFrame, later: DataFrame) -> bool:
    """Tell whether anything is missing between the last of some transitions and the last of later ones."""
    ends = transitions.groupBy("run", "shard").agg(F.max("seq").alias("end"))
    counts = (
        later.where("event != 'damaged'")
        .groupBy("run", "shard")
        .agg(F.max("seq").alias("last"), F.count_distinct("seq").alias("there"))
        .join(ends, ["run", "shard"], "left")
    )
    return not counts.where("last - coalesce(end, 0) > there").isEmpty()


def _ledgers(build: ReportBuild) -> DataFrame:
    books = ledgers(build.transitions.sparkSession, **build.wishes.store or {})
    result = against(build.table("conservation"), books)
    # What the audit knows nothing of has no journal; what no ledger knows is told.
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
"""by their names, in an order in which each is behind what it is made of"""
