"""Tests of journals that contradict themselves or cannot be read: no command reports them as sound."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import SecretStr
from pyspark.sql import SparkSession

from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend, RedisSettings
from taskqueue_redis.scripts.runner import Partitions
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.pipeline.audit import audit, conservation
from taskqueue_spark.pipeline.gaps import contradictions
from taskqueue_spark.report.outcome import outcome_of
from taskqueue_spark.service import StreamOptions
from taskqueue_spark.service.process import Summary, run
from tests.cli.conftest import Cli
from tests.redis.servers import RedisServer
from tests.spark.journaling import line
from tests.spark.report_sample import conserved, total
from tests.spark.small_journals import SmallJournal
from tests.spark.test_cli import _nowhere, cli, on_spark

__all__ = ["_nowhere", "cli", "on_spark"]

_WORKER = {"worker": "w"}


def two_ends() -> tuple[list[bytes], bytes, bytes]:
    """Return the beginning of a task, and two different lines with the next number: an ack and a dead letter."""
    began = [
        line(1, task_id="t"), line(2, task_id="t", event="delivered", state="in_flight", **_WORKER),
        line(4, task_id="u"), line(5, task_id="u", event="delivered", state="in_flight", **_WORKER),
        line(6, task_id="u", event="acked", state="done", **_WORKER),
    ]  # fmt: skip
    acked = line(3, task_id="t", event="acked", state="done", **_WORKER)
    dead = line(3, task_id="t", event="dead_lettered", state="dead", **_WORKER)
    return began, acked, dead


@pytest.mark.usefixtures("on_spark")
def test_a_number_with_two_transitions(cli: Cli, tmp_path: Path) -> None:
    """Fault L2 (G9): two lines with one number and different content fail every check.

    The end of their task is unknown, and the outcome names the contradiction.
    """
    journal = tmp_path / "journal.jsonl"
    began, acked, dead = two_ends()
    journal.write_bytes(b"".join([*began, acked, dead]))
    done = cli("audit", "--journal", str(journal), "--out", "out", "--json")
    assert done.code == 1, done.err
    assert done.json["verdict"]["kind"] == "contradictory"
    (row,) = done.json["conservation"]
    assert (row["balanced"], row["unknown"], row["completed"]) == (False, 1, 1)
    assert done.json["anomalies"]["contradiction"] == 1
    assert done.json["contradictions"] == [{"run": "r1", "shard": 0, "seq": 3}]
    history = cli("history", "--from", "out", "--json")
    assert (history.code, history.json["contradictory"]) == (1, 1)


def test_the_order_in_the_file_decides_nothing(spark: SparkSession) -> None:
    """Fault L2 (G9): the verdict on a task does not depend on which of two ends comes first; equal lines count once."""
    both = ("acked", "dead_lettered")
    whole = SmallJournal()
    for shard, ends in enumerate((both, both[::-1], ("acked", "acked"))):
        journal = SmallJournal(shard=shard)
        for event in ("published", "delivered", *ends):
            journal.tell(len(journal.rows), event, f"t{shard}")
        copied = ends[0] == ends[1]
        journal.rows[-1] |= journal.rows[-2] if copied else {"seq": journal.rows[-2]["seq"]}
        whole.rows += journal.rows
    lives = audit(whole.frame(spark)).orderBy("task_id").collect()
    unknown = ("unknown", ["contradiction"])
    assert [(life["verdict"], life["anomalies"]) for life in lives] == [
        unknown,
        unknown,
        ("completed", []),
    ]
    (row,) = conservation(audit(whole.frame(spark))).collect()
    assert (row["published"], row["completed"], row["balanced"]) == (3, 1, False)


def test_contents_differ_in_any_column(spark: SparkSession) -> None:
    """Fault L2 (G9): a text in another column, or of another queue, is other content; damage has no number."""
    journal = SmallJournal()
    journal.tell(0, "published", "same")
    journal.tell(1, "published", "moved", tenant="x")
    journal.tell(2, "published", "elsewhere")
    journal.tell(3, "damaged", reason="one")
    rows = [
        *journal.rows,
        journal.rows[0],
        journal.rows[1] | {"tenant": None, "ordering_key": "x"},
        journal.rows[2] | {"key": "other"},
        journal.rows[3] | {"reason": "two"},
        journal.rows[0] | {"event": "missing"},
    ]
    frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema=TRANSITIONS))
    assert sorted(row.seq for row in contradictions(frame).collect()) == [2, 3]


def test_a_service_reads_a_contradiction(spark: SparkSession, tmp_path: Path) -> None:
    """Fault L2 (G11): within one batch, a number of two transitions raises an alert, and nothing counts as balanced."""
    began, acked, dead = two_ends()
    (tmp_path / "journal").write_bytes(b"".join([*began, acked, dead]))
    options = StreamOptions(
        out=tmp_path / "out",
        source={"backend": "lines", "path": str(tmp_path / "journal")},
        once=True,
    )
    summary = run(spark, options)
    assert summary.balanced is None
    assert any("numbers that were used again: 1" in alert for alert in summary.alerts)


@pytest.mark.usefixtures("on_spark")
@pytest.mark.parametrize("command", ["audit", "history"])
def test_a_journal_without_a_readable_line(cli: Cli, tmp_path: Path, command: str) -> None:
    """Fault L1 (G9): a journal of damaged lines only fails, because nothing shows that it had no tasks."""
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b"".join(text[:40] + b"\n" for text in two_ends()[0]))
    done = cli(command, "--journal", str(journal), "--json")
    assert (done.code, done.json["ok"]) == (1, False)
    if command == "audit":
        assert done.json["verdict"]["kind"] == "unreadable"


def test_a_service_that_can_read_nothing() -> None:
    """Fault L1 (G11): the exit code of a service that found damaged lines only is not that of a sound journal."""
    counts: dict[str, Any] = {"batches": 1, "balanced": None, "lost": 0, "alerts": []}
    assert not Summary(transitions=0, damaged=3, **counts).sound
    assert Summary(transitions=1, damaged=3, **counts).sound
    assert Summary(transitions=0, damaged=0, **counts).sound


def test_outcomes_of_damage() -> None:
    """G9: contradictions and unreadable journals are faults; a queue that gaps may hide is unknown, not empty."""
    whole = total(conserved("k", published=1, completed=1))
    none = total()
    assert outcome_of(whole, contradictory=1).kind == "contradictory"
    assert not outcome_of(whole, contradictory=1).ok
    assert "no task is lost" not in " ".join(outcome_of(whole, contradictory=1).sentences)
    assert outcome_of(none, damaged=3, readable=False).kind == "unreadable"
    assert outcome_of(none, gaps=3, readable=False).kind == "unreadable"
    assert not outcome_of(none, damaged=3, readable=False).ok
    assert outcome_of(none, damaged=3).kind == outcome_of(none, gaps=3).kind == "unknown"
    assert outcome_of(none, readable=False).kind == "empty"


@pytest.mark.usefixtures("on_spark")
def test_the_store_is_asked_about_the_unknown(
    cli: Cli, redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault L2 (G9): if the journal's last entry is gone, the store says where the tasks before it are now."""
    settings = RedisSettings(url=SecretStr(redis_server.url), prefix=redis_prefix, partitions=1)

    async def publish() -> None:
        backend = RedisBackend(settings=settings)
        found = await backend.control.settings("q")
        await backend.control.configure("q", found.model_copy(update={"journal": True}))
        for _ in range(20):
            await backend.publisher.publish(Task(key="q", payload=b"1"))
        await backend.aclose()

    asyncio.run(publish())
    journal = f"{Partitions(redis_prefix, 1).of('q')}:journal"
    ((last, _),) = redis_server.call("XREVRANGE", journal, "+", "-", "COUNT", 1)
    redis_server.call("XDEL", journal, last)
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    done = cli("audit", "--backend", "redis", "--json")
    assert done.json["missing"] == 1, json.dumps(done.json)
    (row,) = done.json["conservation"]
    assert (row["unknown"], row["waiting"]) == (0, 19)
