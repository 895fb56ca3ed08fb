"""Tests of the figures in a report whose tables are longer than the page shows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.report import content
from taskqueue_spark.report.build import ReportBuild, Wishes
from taskqueue_spark.report.content import audit_content
from tests.spark.report_sample import conserved
from tests.spark.small_journals import SmallJournal

QUEUES = 201
"""one more queue than a report shows"""


def making(spark: SparkSession, tmp_path: Path, **made: DataFrame) -> ReportBuild:
    """Return the state of a report for which the store was queried and these tables exist."""
    nothing = spark.createDataFrame(TRANSITIONS.empty_table())
    found = ReportBuild(nothing, tmp_path, Wishes(store={}))
    found.made.update(made)
    return found


def test_every_queue_counts_however_small_it_is(spark: SparkSession, tmp_path: Path) -> None:
    """A loss in the smallest of many queues is part of the verdict, and its queue is shown first (G9, G10).

    The same holds for a difference between a queue's ledger and the journal.
    """
    queues = [conserved(f"q{n:03}", published=2, completed=2) for n in range(QUEUES - 1)]
    small = conserved("small", published=1, lost=1)
    ledgers = [("a", 9, 4), ("b", 1, -3)]
    found = audit_content(
        making(
            spark, tmp_path,
            conservation=spark.createDataFrame(pa.Table.from_pylist([*queues, small])),
            audit=spark.sql("select 'x' as key, 'x' as task_id, 1 as life, 'x' as verdict, 'x' as reason, "
                            "'x' as last_event, now() as last_at, array('orphan') as anomalies where false"),
            gaps=spark.sql("select 'r' as run, 0 as shard, 1 as first, 1 as last, 1 as missing where false"),
            contradictions=spark.sql("select 'r' as run, 0 as shard, 1 as seq where false"),
            ledgers=spark.createDataFrame(ledgers, "key string, ledger_published long, more_published long"),
        ),
        0,
    )  # fmt: skip
    verdict = found.outcome()
    assert verdict.kind == "lost"
    assert "Of 401 tasks" in verdict.sentences[0]
    assert "3 tasks of the journal are not in the ledger of the store." in verdict.sentences
    assert (found.total["queues"], len(found.conservation)) == (QUEUES, QUEUES - 1)
    assert found.conservation[0] == small
    assert found.ledgers[0]["key"] == "b"


def test_figures_are_of_all_rows(spark: SparkSession, tmp_path: Path) -> None:
    """The headline figures include the rows that the tables omit (G10)."""
    kinds = (
        "key string, window_start timestamp, executions long, queue_wait_p95 double, run_p95 double"
    )
    latency = [(f"q{n}", None, 2, 0.1 * n, 0.5) for n in range(QUEUES)]
    workers = [("a", f"w{n:03}", 1, 1) for n in range(QUEUES)]
    told = making(
        spark, tmp_path,
        latency=spark.createDataFrame(latency, kinds),
        throughput=spark.createDataFrame(
            [(f"q{n}", None, 1, 2) for n in range(QUEUES)],
            "key string, window_start timestamp, lost long, redelivered long",
        ),
        failures=spark.createDataFrame([(f"f{n}", 3) for n in range(QUEUES)], "key string, attempts long"),
        concurrency=spark.createDataFrame(
            [*workers, ("a", None, QUEUES, 77), ("b", None, 1, 1)],
            "key string, worker string, executions long, peak long",
        ),
    )  # fmt: skip
    figures = content._headline_metrics(told)
    assert figures.pop("wait_p95") == pytest.approx(20.0)
    assert figures == {"executions": 402, "run_p95": 0.5, "again": 603, "failed": 603, "peak": 77}
    shown = content._concurrency(told)
    assert [row["key"] for row in shown if row["worker"] is None] == ["a", "b"]


@pytest.mark.usefixtures("compiled")
def test_the_backlog_has_what_came_back(spark: SparkSession, tmp_path: Path) -> None:
    """A task that is revived, or older than the journal, counts in the backlog until its end (G10)."""
    journal = SmallJournal()
    journal.tell(0, "published", "a")
    journal.tell(0, "published", "b")
    journal.tell(1, "delivered", "a")
    journal.tell(1, "dead_lettered", "a")
    journal.tell(2, "retried", "a", attempt=2, due=3)
    journal.tell(3, "acked", "old")
    journal.tell(4, "acked", "b")
    told = ReportBuild(journal.frame(spark), tmp_path, Wishes())
    flow = content._flow(told, content.extent(told.transitions), ["k"])
    assert flow["seconds"] == 0.05
    backlog = flow["all"]["backlog"]
    assert [backlog[round(second / 0.05)] for second in (0, 1, 2, 3, 4)] == [3, 2, 3, 2, 1]
    assert sum(flow["all"]["failed"]) == 2
