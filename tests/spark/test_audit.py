"""Tests that the audit is correct for journals whose truth is known, and detects damage to a journal."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name

from taskqueue_core.capabilities import QueueSettings
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.pipeline.audit import VERDICTS, against, audit, conservation
from taskqueue_spark.pipeline.gaps import gaps
from tests.spark.compiling import compiling
from tests.spark.small_journals import SmallJournal
from tests.spark.synthetic import (
    Made,
    cut,
    doubled,
    made,
    moved,
    removed,
    renumbered,
    repeated,
    swapped,
)

_LIVE = ("blocked", "waiting", "scheduled", "in_flight")


def truth(rows: list[Row]) -> Counter[tuple[str, str]]:
    """Return the verdicts of a conservation table in the form of a synthetic journal's truth."""
    return +Counter({(row["key"], verdict): row[verdict] for row in rows for verdict in VERDICTS})


@pytest.mark.parametrize("tasks", [3_000, pytest.param(305_000, marks=pytest.mark.soak)])
def test_the_truth_about_a_million(spark: SparkSession, tmp_path: Path, tasks: int) -> None:
    """In a million transitions every life gets the correct verdict, and the verdicts of each queue add up (G9)."""
    journal = made(7, tasks, keys=5, shards=3, skew=0.5)
    assert len(journal.table) > 3.2 * tasks
    pq.write_table(journal.table, tmp_path / "journal.parquet", row_group_size=250_000)
    kept = spark.read.parquet(str(tmp_path / "journal.parquet"))
    with compiling(spark) if tasks > 100_000 else nullcontext():
        rows = conservation(audit(kept)).collect()
    assert truth(rows) == journal.truth
    for row in rows:
        assert row["balanced"]
        assert row["complete"]
        assert row["published"] == sum(row[verdict] for verdict in VERDICTS)
        assert row["earlier"] == 0


class Fates:
    """A correct journal and damaged copies of it, each with a run, keys and shards of its own, audited together."""

    def __init__(self, spark: SparkSession) -> None:
        self.sound: Made = made(11, 400, keys=1, shards=1)
        table = self.sound.table
        self.ids: dict[str, str] = {}
        gone, self.ids["removed"] = removed(table)
        unnoted, self.ids["unnoted"] = removed(table, nth=3)
        twice, self.ids["twice"] = doubled(table)
        other, self.ids["swapped"], self.ids["changeling"] = swapped(table)
        journals = {
            "sound": table,
            "removed": gone,
            "unnoted": renumbered(unnoted),
            "twice": twice,
            "swapped": other,
            "trimmed": cut(table, 0, 1, 300),
            "cut": cut(table, 0, 900, 940),
            "repeated": repeated(table, 100, 400),
        }
        parts = [moved(part, name, place) for place, (name, part) in enumerate(journals.items())]
        journal = pa.concat_tables(
            [*parts, *_runs(), *_switched(), *_overlapping(), *_told_to_be_missing()]
        )
        self.transitions = spark.createDataFrame(journal)
        self.audited = audit(
            self.transitions, live=self._live(spark, list(journals)), grace_seconds=60.0
        )
        self.rows = self.audited.collect()
        self.gaps = gaps(self.transitions).collect()

    def _live(self, spark: SparkSession, names: list[str]) -> DataFrame:
        """Return the live tasks in the store: those that the correct journal leaves alive."""
        states = dict(
            zip(
                self.sound.table["task_id"].to_pylist(),
                self.sound.table["state"].to_pylist(),
                strict=True,
            )
        )
        as_of = TRANSITIONS.field("ts").type
        late = pa.scalar(_END, as_of)
        rows = [
            {"key": f"{name}/k0", "task_id": task, "state": state, "as_of": late.as_py()}
            for name in names
            for task, state in states.items()
            if state in _LIVE
        ]
        return spark.createDataFrame(pa.Table.from_pylist(rows))

    def verdicts(self, name: str) -> Counter[str]:
        """Count the verdicts in one journal."""
        return Counter(row["verdict"] for row in self.rows if row["key"] == f"{name}/k0")

    def of(self, name: str, task: str) -> Row:
        """Return the audit's row for the last life of a task."""
        lives = [r for r in self.rows if (r["key"], r["task_id"]) == (f"{name}/k0", task)]
        return max(lives, key=lambda row: int(row["life"]))


_END = 1_790_000_000_000_000 + 100_000_000_000


def _runs() -> list[pa.Table]:
    """Return a run that ended with two live tasks, and the next run, which publishes one of their ids again."""
    journal = SmallJournal(key="restarted/k0", run="first", shard=90)
    for task in ("done", "alive", "again"):
        journal.tell(0, "published", task)
    journal.tell(1, "delivered", "done", state="in_flight")
    journal.tell(2, "acked", "done")
    journal.run = "second"
    journal.tell(10, "published", "again")
    journal.tell(11, "delivered", "again")
    return [pa.Table.from_pylist(journal.rows, schema=TRANSITIONS)]


def _switched() -> list[pa.Table]:
    """Return a queue with tasks older than its journal, and a queue whose journal was switched off."""

    def settings(version: int, *, journal: bool = True) -> str:
        return QueueSettings(version=version, journal=journal).model_dump_json()

    late = SmallJournal(key="late/k0", run="late", shard=91)
    late.tell(0, "configured", reason=settings(3))
    late.tell(1, "acked", "older")
    late.tell(2, "published", "newer")
    off = SmallJournal(key="off/k0", run="off", shard=92)
    off.tell(0, "configured", reason=settings(1))
    off.tell(1, "published", "waits")
    off.tell(2, "configured", reason=settings(2, journal=False))
    return [pa.Table.from_pylist(one.rows, schema=TRANSITIONS) for one in (late, off)]


def _overlapping() -> list[pa.Table]:
    """Return a run, a shorter run within its time, and a third run after both."""
    tables = []
    for run, times in (("long", (0, 100)), ("brief", (50, 60)), ("last", (200, 201))):
        journal = SmallJournal(key="overlapping/k0", run=run, shard=93)
        for number, time in enumerate(times):
            journal.tell(time, "published", f"{run}-{number}")
        tables.append(pa.Table.from_pylist(journal.rows, schema=TRANSITIONS))
    return tables


def _told_to_be_missing() -> list[pa.Table]:
    """Return a journal of 100 numbers that contains four rows and reports the others as missing."""
    journal = SmallJournal(key="missing/k0", run="missing", shard=94)
    journal.tell(0, "published", "waits")
    journal.tell(0, "published", "dies")
    journal.tell(1, "delivered", "dies", state="in_flight")
    journal.tell(2, "dead_lettered", "dies", state="dead")
    rows = journal.rows
    for seq in (3, 101):
        rows.append(
            rows[0] | {"event": "missing", "seq": seq, "key": "", "task_id": "", "state": ""}
        )
    return [pa.Table.from_pylist(rows, schema=TRANSITIONS)]


@pytest.fixture(scope="module")
def fates(spark: SparkSession) -> Fates:
    """Audit all the journals together, once for all tests."""
    with compiling(spark):
        return Fates(spark)


def test_a_sound_journal(fates: Fates) -> None:
    """A correct journal has no anomalies, and rows that are read twice count once (G9; fault L2)."""
    expected = Counter({verdict: count for (_, verdict), count in fates.sound.truth.items()})
    assert fates.verdicts("sound") == fates.verdicts("repeated") == expected
    sound = [r for r in fates.rows if r["key"] in {"sound/k0", "repeated/k0"}]
    assert not any(row["anomalies"] or row["reason"] or row["earlier"] for row in sound)
    assert {row["run"] for row in fates.gaps} == {"removed", "trimmed", "cut", "missing"}


def test_an_ack_is_removed(fates: Fates) -> None:
    """If an ack is removed, its number is missing, so the task's verdict is unknown rather than lost (G9)."""
    row = fates.of("removed", fates.ids["removed"])
    assert (row["verdict"], row["last_event"]) == ("unknown", "delivered")
    (gap,) = [gap for gap in fates.gaps if gap["run"] == "removed"]
    assert gap["missing"] == 1
    assert row["last_seq"] < gap["first"] == gap["last"]
    assert fates.verdicts("removed")["lost"] == 0


def test_an_ack_was_never_noted(fates: Fates) -> None:
    """A task is lost if no number is missing, the journal has no end of it, and the store has no record of it (G9)."""
    row = fates.of("unnoted", fates.ids["unnoted"])
    assert (row["verdict"], row["reason"]) == ("lost", "not in the store")
    expected = fates.verdicts("sound")
    expected.subtract({"completed": 1, "lost": -1})
    assert fates.verdicts("unnoted") == expected


def test_an_ack_is_doubled(fates: Fates) -> None:
    """An ack that is recorded twice is an anomaly, but the task still counts as completed once (G9)."""
    row = fates.of("twice", fates.ids["twice"])
    assert (row["verdict"], row["anomalies"]) == ("completed", ["duplicate_ack"])
    assert fates.verdicts("twice") == fates.verdicts("sound")


def test_a_task_is_swapped(fates: Fates) -> None:
    """If an ack has another task's id, the first task is lost, and the other one was never published (G9)."""
    row = fates.of("swapped", fates.ids["swapped"])
    assert (row["verdict"], row["reason"]) == ("lost", "not in the store")
    changeling = fates.of("swapped", fates.ids["changeling"])
    assert (changeling["anomalies"], changeling["published_at"]) == (["orphan"], None)
    assert not changeling["earlier"]


def test_a_shard_is_trimmed(fates: Fates) -> None:
    """After trimming, tasks published before are marked as earlier, and no queue counts as complete (G9)."""
    rows = [row for row in fates.rows if row["key"] == "trimmed/k0"]
    earlier = [row for row in rows if row["earlier"]]
    assert earlier
    assert not any(row["complete"] for row in rows)
    assert not any(row["anomalies"] for row in rows)
    assert fates.verdicts("trimmed")["lost"] == 0
    (gap,) = [gap for gap in fates.gaps if gap["run"] == "trimmed"]
    assert (gap["first"], gap["last"], gap["missing"]) == (1, 300, 300)


def test_a_span_is_cut_out(fates: Fates) -> None:
    """A task whose end may be in a missing range is unknown, and the missing rows cause no anomalies (G9)."""
    assert fates.verdicts("cut")["unknown"] > 0
    assert fates.verdicts("cut")["lost"] == 0
    assert not any(row["anomalies"] for row in fates.rows if row["key"] == "cut/k0")


def test_a_run_has_ended(fates: Fates) -> None:
    """Tasks alive at the end of a run are lost, and the same id in the next run is another life (G9)."""
    told = {
        (row["task_id"], row["life"]): (row["verdict"], row["reason"])
        for row in fates.rows
        if row["key"] == "restarted/k0"
    }
    assert told == {
        ("done", 1): ("completed", None),
        ("alive", 1): ("lost", "its run ended"),
        ("again", 1): ("lost", "its run ended"),
        ("again", 2): ("lost", "not in the store"),
    }


def test_runs_at_the_same_time(fates: Fates) -> None:
    """A run has ended as soon as any later run began after its last row, not only the next one (G9)."""
    reasons = {r["task_id"]: r["reason"] for r in fates.rows if r["key"] == "overlapping/k0"}
    assert {reasons[f"{run}-0"] for run in ("long", "brief")} == {"its run ended"}
    assert reasons["last-0"] == "not in the store"


def test_what_is_reported_as_missing(fates: Fates) -> None:
    """If rows after the last number are missing, every task may have changed, even a dead letter (G9; OPEN-C1)."""
    (gap,) = [(r["first"], r["last"]) for r in fates.gaps if r["run"] == "missing"]
    assert gap == (5, 100)
    assert fates.verdicts("missing") == Counter(unknown=2)


def test_a_queue_is_not_noted_all_the_time(fates: Fates) -> None:
    """A task from before the journal is marked as earlier.

    A task's end after the journal was switched off is unknown (G9).
    """
    older, newer = fates.of("late", "older"), fates.of("late", "newer")
    assert (older["verdict"], older["earlier"], older["anomalies"]) == ("completed", True, [])
    assert (newer["verdict"], newer["complete"]) == ("lost", False)
    assert fates.of("off", "waits")["verdict"] == "unknown"


def test_the_books(spark: SparkSession, fates: Fates) -> None:
    """The verdicts of each queue add up, except where a task id was replaced, and agree with a correct ledger (G9)."""
    lives = spark.createDataFrame(fates.rows, fates.audited.schema)
    kept = {row["key"]: row for row in conservation(lives).collect()}
    assert {key for key, row in kept.items() if not row["balanced"]} == {"swapped/k0"}
    assert {key for key, row in kept.items() if row["earlier"]} == {"trimmed/k0", "late/k0"}
    sound = fates.verdicts("sound")
    states = {"done": "completed", "dead": "dead_lettered"}
    ledger: dict[str, Any] = {
        name: sound[states.get(name, name)]
        for name in (*_LIVE, "done", "dead", "expired", "cancelled", "discarded")
    }
    ledger["published"] = sum(ledger.values())
    shards = conservation(lives.where(F.col("key").isin("sound/k0", "twice/k0"))).withColumn(
        "key", F.concat_ws("", F.lit("q:s"), F.length("key").cast("string"), F.lit("@1x2-00ff"))
    )
    doubled = {name: 2 * count for name, count in ledger.items()}
    books = spark.createDataFrame([{"key": "q", **doubled}, {"key": "r", **ledger}])
    told = {row["key"]: row for row in against(shards, books).collect()}
    assert told["q"]["agrees"]
    assert not told["r"]["agrees"]
    assert told["r"]["more_done"] == ledger["done"]
