"""Test of the audit of a report, which combines a snapshot, the store and the journal after the snapshot."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from taskqueue_spark.batch_reader import pinned, read_journal
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.options import ReadOptions
from taskqueue_spark.report import build
from taskqueue_spark.report.build import ReportBuild, Wishes, audited
from tests.spark.as_lines import lines_of
from tests.spark.small_journals import SmallJournal, at


def test_what_ended_behind_the_snapshot_is_not_lost(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that ended after the snapshot is completed, even if the store has forgotten it.

    If the journal after the snapshot has a gap, the task is unknown (G9; fault L2). The store is queried for dead
    letters too.
    """
    journal = SmallJournal()
    for task in ("ended", "gone", "here", "dead"):
        journal.tell(0, "published", task)
    journal.tell(1, "delivered", "dead")
    journal.tell(1, "dead_lettered", "dead")
    path = tmp_path / "journal.jsonl"

    def kept() -> None:
        path.write_bytes(b"".join(lines_of(pa.Table.from_pylist(journal.rows, schema=TRANSITIONS))))

    kept()
    options = {"path": str(path)}
    end = pinned(ReadOptions.of(options))
    transitions = read_journal(spark, options | {"endingOffsets": end}, pin=False)
    journal.tell(2, "delivered", "ended")
    journal.tell(3, "acked", "ended")
    kept()
    behind = options | {"startingOffsets": end}
    answers: list[tuple[str, str | None, datetime]] = [
        ("here", "waiting", at(200)),
        ("dead", "dead", at(200)),
    ]
    answers += [(task, None, at(200)) for task in ("ended", "gone")]
    asked = spark.createDataFrame(answers, "task_id string, state string, as_of timestamp")
    asked = asked.selectExpr("'k' as key", "*")

    def verdicts() -> dict[str, str]:
        made = ReportBuild(transitions, tmp_path / "out", Wishes(store={}, behind=behind))
        made.made["asked"] = asked
        return {row.task_id: row.verdict for row in audited(made).collect()}

    told = {"here": "waiting", "dead": "dead_lettered", "ended": "completed", "gone": "lost"}
    assert verdicts() == told
    journal._seqs["r1", 0] += 1
    journal.tell(4, "published", "new")
    kept()
    assert verdicts() == told | {"gone": "unknown"}

    wanted = []
    monkeypatch.setattr(build, "live_states", lambda ids, **_: wanted.extend(ids.collect()))
    build._live_states_of(ReportBuild(transitions, tmp_path / "out", Wishes(store={})))
    assert {row.task_id for row in wanted} == set(told)
