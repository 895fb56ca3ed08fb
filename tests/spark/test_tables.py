"""Tests of tables in a folder: snapshots, versions, and recovery from killed writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.pipeline import tables

KILLED = """
import os, signal, sys
import pyarrow as pa, pyarrow.parquet as pq
from taskqueue_spark.pipeline import tables

place = tables.folder(sys.argv[1])
STEPS = "os.mkdir", "os.symlink", "os.rename", "os.remove", "shutil.rmtree"

def write(steps):
    def tick(event, arguments):
        nonlocal steps
        if event in STEPS:
            steps -= 1
            if steps < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(tick)
    with tables._locked(place):
        version = tables._version(place, "one")
        version.mkdir()
        pq.write_table(pa.table({"n": list(range(9))}), version / "part.parquet")
        tables._put(place, "one", version)
        tables._sweep(place)

code, steps = 1, 0
while code:
    child = os.fork()
    if not child:
        write(steps)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(tables.rows(place, "one"), code, flush=True)
    steps += 1
"""
"""Program that writes a table repeatedly, and is killed one step later each time, until a write succeeds."""
BEGIN = datetime(2026, 11, 21, 23, 59, 59, tzinfo=UTC)


def row(seq: int, event: str = "published", **more: Any) -> dict[str, Any]:
    """Return a transition, one second after the previous number's."""
    return {
        "shard": 0, "run": "r", "seq": seq, "ts": BEGIN + timedelta(seconds=seq - 1), "event": event,
        "key": "k", "task_id": f"t{seq}", "attempt": 1, "losses": 0, "state": "waiting", "priority": 5,
    } | more  # fmt: skip


def frame(spark: SparkSession, *rows: dict[str, Any]) -> DataFrame:
    """Return a journal of these rows as a data frame."""
    return spark.createDataFrame(pa.Table.from_pylist(list(rows), schema=TRANSITIONS))


def seqs(found: DataFrame) -> list[int]:
    """Return the sorted numbers of the transitions."""
    return sorted(one.seq for one in found.select("seq").collect())


def test_a_snapshot_is_the_journal_by_date_and_apart_what_was_damaged(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A snapshot has every row once with its types, and damaged rows in another table (G9, G10; fault L1)."""
    journal = frame(
        spark,
        row(1),
        row(2, tenant="a", due_at=BEGIN),
        row(3, "damaged", task_id="", reason="no JSON"),
        row(4, "acked", error="\u2603 'x'"),
    )
    for _ in range(2):
        assert tables.snapshot(journal, tmp_path) == tables.Snapshot(3, 1)
        found = tables.read_transitions(spark, tmp_path)
        assert found.toArrow().schema.remove_metadata().equals(_nullable())
        assert seqs(found) == [1, 2, 4]
        (damaged,) = tables.read(spark, tmp_path, "damaged").collect()
        assert (damaged.seq, damaged.reason) == (3, "no JSON")
    days = {path.name for path in (tmp_path / "transitions").iterdir() if path.is_dir()}
    assert days == {"date=2026-11-21", "date=2026-11-22"}
    since, until = BEGIN + timedelta(seconds=1), BEGIN + timedelta(seconds=3)
    assert seqs(tables.read_transitions(spark, tmp_path, since)) == [2, 4]
    assert seqs(tables.read_transitions(spark, tmp_path, since, until)) == [2]
    assert seqs(tables.read_transitions(spark, tmp_path, until=since)) == [1]


def _nullable() -> pa.Schema:
    return pa.schema([field.with_nullable(nullable=True) for field in TRANSITIONS])


def test_a_folder_that_is_not_shared_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this process does not see the workers' files, the write fails, and the previous table stays (G12)."""
    first, second = tables.folder(tmp_path / "here"), tmp_path / "there"
    tables.write(spark.range(3).toDF("n"), first, "one")
    monkeypatch.setattr(tables, "_uri", lambda path: f"file://{second}/{path.name}")
    with pytest.raises(ConfigurationError, match=r"Spark wrote: 5; .*: 0; .*same path"):
        tables.write(spark.range(5).toDF("n"), first, "one")
    with pytest.raises(ConfigurationError, match=r"Spark wrote: 1; .*: 0; .*same path"):
        tables.snapshot(frame(spark, row(1)), first)
    assert tables.rows(first, "one") == 3
    assert not (first / "transitions").exists()


def test_an_empty_journal_is_one_too(spark: SparkSession, tmp_path: Path) -> None:
    """An empty journal gives an empty snapshot that can be read (G10)."""
    assert tables.snapshot(frame(spark), tmp_path) == tables.Snapshot(0, 0)
    assert tables.read_transitions(spark, tmp_path).count() == 0
    assert tables.read(spark, tmp_path, "damaged").count() == 0
    assert tables.rows(tmp_path / "nowhere", "damaged") == 0


def test_a_table_is_replaced_whole_and_what_was_read_can_be_finished(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A reader of the previous version can finish, while older versions are removed (G10; fault L1)."""
    first = tables.write(spark.range(3).toDF("n"), tmp_path, "one")
    left = tmp_path / ".versions" / "one-abandoned"
    left.mkdir()
    os.utime(left, (1, 1))
    tables.write(spark.range(5).toDF("n"), tmp_path, "one")
    assert (first.count(), tables.rows(tmp_path, "one")) == (3, 5)
    assert not left.exists()
    tables.write(spark.range(7).toDF("n"), tmp_path, "one")
    assert tables.read(spark, tmp_path, "one").count() == 7
    assert len(list((tmp_path / ".versions").glob("one-*"))) == 2


def test_a_kill_while_writing_leaves_the_version_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A kill at any step of a write leaves a complete table, and the next write works (G10; fault L1)."""
    tables.write(spark.range(2).toDF("n"), tmp_path, "one")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    told = [line.split() for line in done.stdout.splitlines()]
    counts = [int(count) for count, _ in told]
    assert (counts[0], counts[-1]) == (2, 9)
    assert set(counts) == {2, 9}
    assert [code for _, code in told] == [str(-signal.SIGKILL)] * (len(told) - 1) + ["0"]
    assert len(told) > 4
    assert tables.write(spark.range(4).toDF("n"), tmp_path, "one").count() == 4


def test_folders_that_cannot_be_used_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A folder is refused if it is a pattern or a file, is in use, or has no valid table (G10)."""
    with pytest.raises(InvalidInput):
        tables.folder(tmp_path / "a*")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be created"):
        tables.folder(tmp_path / "file")
    (tmp_path / "other/one").mkdir(parents=True)
    table = spark.range(1).toDF("n")
    with pytest.raises(ConfigurationError, match="not a table"):
        tables.write(table, tmp_path / "other", "one")
    place = tables.folder(tmp_path / "used")
    with tables._locked(place), pytest.raises(ConfigurationError, match="another process"):
        tables.write(table, place, "one")
    with pytest.raises(ConfigurationError, match="no table named transitions"):
        tables.read_transitions(spark, place)
