"""Tests of digests: changes that leave consistent numbers and histories are found, in the journals of both backends."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend, MemorySettings
from taskqueue_spark.columns import TRANSITIONS
from taskqueue_spark.pipeline.digests import DigestCheck, check_digests
from taskqueue_spark.report.outcome import outcome_of
from tests.cli.conftest import Cli
from tests.redis.backends import opened, take
from tests.redis.servers import RedisServer
from tests.spark.report_sample import conserved, total
from tests.spark.test_cli import _nowhere, cli, on_spark
from tests.spark.test_lines import reasons, seqs, told
from tests.spark.test_redis_journal import everything

__all__ = ["_nowhere", "cli", "on_spark"]

Lines = list[bytes]
Rows = list[dict[str, Any]]


async def _job(path: Path, *, digests: bool) -> None:
    settings = MemorySettings(journal=path, journal_digests=digests)
    backend = MemoryBackend(settings=settings, clock=ManualClock())
    await backend.publisher.publish(*(Task(id=f"t{n}", key="k", payload=b"1") for n in range(5)))
    async with backend.subscribe(["k"], "w") as taking:
        for delivery in (await taking.receive(5, 0)).deliveries:
            await taking.ack(delivery)
    await backend.aclose()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Return a journal with digests: five tasks with three lines each, and the end mark."""
    path = tmp_path / "journal.jsonl"
    asyncio.run(_job(path, digests=True))
    return path


def check(spark: SparkSession, rows: Rows) -> DigestCheck:
    """Check the digests of rows, of which there must be some."""
    frame = spark.createDataFrame(pa.Table.from_pylist(rows, schema=TRANSITIONS))
    result = check_digests(frame)
    assert result is not None
    return result


def written(lines: Sequence[dict[str, Any]]) -> Lines:
    """Return lines as a journal file has them."""
    return [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines]


def renumbered(lines: Lines) -> Lines:
    """Remove a whole task, and number the other lines without a gap."""
    kept = [json.loads(line) for line in lines if b'"task_id":"t2"' not in line]
    return written([line | {"seq": number} for number, line in enumerate(kept, start=1)])


def swapped(lines: Lines) -> Lines:
    """Turn the last ack into a dead letter."""
    dead = lines[-2].replace(b'"acked"', b'"dead_lettered"').replace(b'"done"', b'"dead"')
    return [*lines[:-2], dead, lines[-1]]


def exchanged(lines: Lines) -> Lines:
    """Exchange the tasks of the first two lines."""
    first, second = (line.replace(b'"t0"', b'"?"') for line in lines[:2])
    return [first.replace(b'"?"', b'"t1"'), second.replace(b'"t1"', b'"t0"'), *lines[2:]]


def stripped(lines: Lines) -> Lines:
    """Remove the digest of one line in the middle."""
    line = json.loads(lines[5])
    del line["digest"]
    return [*lines[:5], *written([line]), *lines[6:]]


def test_what_is_written_is_sound(spark: SparkSession, journal: Path) -> None:
    """G9: an unchanged journal, and a copy of it, match their digests; the last line is the end mark."""
    found = check(spark, told(journal))
    assert (found.transitions, found.altered, found.unfinished) == (16, 0, 0)
    assert told(journal)[-1]["event"] == "closed"
    (journal.parent / "copy.jsonl").write_bytes(journal.read_bytes())
    assert check(spark, told(journal.parent)) == found


def test_another_process_continues_the_file(spark: SparkSession, journal: Path) -> None:
    """G9: each run in a file has digests of its own, and a run without digests is not checked."""
    asyncio.run(_job(journal, digests=True))
    asyncio.run(_job(journal, digests=False))
    rows = told(journal)
    found = check(spark, rows)
    assert (found.transitions, found.altered, len(found.ends), found.unfinished) == (32, 0, 2, 0)
    assert len(seqs(rows)) == 47


@pytest.mark.parametrize("change", [renumbered, swapped, exchanged, stripped])
def test_a_consistent_change_is_found(
    spark: SparkSession, journal: Path, change: Callable[[Lines], Lines]
) -> None:
    """Fault L2 (G9): a removal with renumbering and a swapped outcome do not match the digests."""
    journal.write_bytes(b"".join(change(journal.read_bytes().splitlines(keepends=True))))
    found = check(spark, told(journal))
    assert found.altered == len(found.first) > 0


def test_a_cut_at_the_end_of_a_line(spark: SparkSession, journal: Path) -> None:
    """Fault L2 (G9): without its last lines, a journal has no end mark, and its last digest is another one."""
    rows = told(journal)
    whole, found = check(spark, rows), check(spark, rows[:-3])
    assert (found.altered, found.unfinished) == (0, 1)
    assert found.ends != whole.ends
    assert check(spark, [*rows[:-3], rows[-1] | {"seq": rows[-3]["seq"]}]).altered == 1


def test_gaps_and_damage_are_no_change(spark: SparkSession, journal: Path) -> None:
    """Fault L1 (G9): a damaged line is reported as such, and the line after it is not called altered."""
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:30] + b"\n"
    journal.write_bytes(b"".join(lines))
    rows = told(journal)
    assert check(spark, rows).altered == 0
    assert len(reasons(rows)) == 1


async def _changes(server: RedisServer, prefix: str, *, digests: bool | None) -> None:
    """Write entries with one and with several changes, with one and with several values per column."""
    key = f"k-{secrets.token_hex(4)}"
    async with opened(server.url, prefix, journal_digests=digests) as backend:
        await backend.control.configure(key, QueueSettings(journal=True))
        await backend.publisher.publish(
            *(Task(key=key, tenant="x", priority=n % 3, ordering_key=f"o{n}") for n in range(6))
        )
        async with backend.subscribe([key], "w") as subscription:
            first, second, third, *others = await take(subscription, 6)
            for delivery in (first, second):
                await backend.publisher.schedule_retry(
                    delivery.task, backend.now() + 60, error="b\u00f6\0m\n", settles=delivery
                )
            await subscription.redeliver(third, lost=True)
            await subscription.dead_letter(others[0], "enough", "boom")
            await subscription.ack(*others[1:])


async def test_the_journal_in_redis(
    spark: SparkSession, redis_server: RedisServer, redis_prefix: str
) -> None:
    """Fault L2 (G9): every digest that the scripts write matches; a changed or removed transition does not."""
    await _changes(redis_server, redis_prefix, digests=True)
    await _changes(redis_server, redis_prefix, digests=None)
    rows = await asyncio.to_thread(everything, redis_server.url, redis_prefix)
    found = check(spark, rows)
    assert (found.transitions, found.altered, found.first) == (len(rows), 0, [])
    assert found.ends == [
        {"run": rows[0]["run"], "shard": 0, "seq": len(rows), "digest": rows[-1]["digest"]}
    ]
    assert redis_server.call("HGET", f"{{{redis_prefix}:0}}:meta", "journal_digest") == (
        rows[-1]["digest"].encode()
    )
    names = [
        "event",
        "key",
        "task_id",
        "state",
        "worker",
        "error",
        "reason",
        "tenant",
        "ordering_key",
    ]
    # For each column a run of its own without the beginning, which depends on the run.
    parts = [[*rows[5:7], rows[7] | {name: "acked"}, *rows[8:]] for name in names]
    changed = check(
        spark,
        [row | {"run": name} for name, part in zip(names, parts, strict=True) for row in part],
    )
    assert [(row["run"], row["seq"]) for row in changed.first] == [
        (name, 8) for name in sorted(names)
    ]
    closed = [row | {"seq": row["seq"] - 1} if row["seq"] > 9 else row for row in rows]
    assert check(spark, [row for n, row in enumerate(closed, 1) if n != 9]).altered
    assert (
        check(spark, [row for n, row in enumerate(rows, 1) if n not in {1, 2, 3, 9}]).altered == 0
    )


async def test_digests_begin_and_end(
    spark: SparkSession, redis_server: RedisServer, redis_prefix: str
) -> None:
    """G9: the setting takes effect from the next change on, and an unset one leaves what is stored."""
    for digests in (None, True, None, False, True):
        await _changes(redis_server, redis_prefix, digests=digests)
    rows = await asyncio.to_thread(everything, redis_server.url, redis_prefix)
    parts = [rows[n : n + len(rows) // 5] for n in range(0, len(rows), len(rows) // 5)]
    assert [all(row["digest"] for row in part) for part in parts] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert check(spark, rows).altered == 0
    assert check(spark, rows).transitions == len(rows) // 5 * 3


@pytest.mark.usefixtures("on_spark")
def test_the_audit_checks_digests(cli: Cli, journal: Path) -> None:
    """Fault L2 (G9): the audit of a file with a swapped outcome fails, also from its snapshot."""
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(swapped(lines)))
    for where in (["--journal", str(journal), "--out", "out"], ["--from", "out"]):
        done = cli("audit", *where, "--json")
        assert (done.code, done.json["verdict"]["kind"]) == (1, "altered"), done.err
        assert done.json["digests"]["first"][0]["seq"] == 15


def test_an_altered_journal_is_a_fault() -> None:
    """G9: altered lines fail; a missing end mark is only mentioned, because a killed process leaves none."""
    whole = total(conserved("k", published=1, completed=1))
    assert not outcome_of(whole, altered=1).ok
    open_end = outcome_of(whole, unfinished=1)
    assert open_end.ok
    assert "without an end mark" in open_end.sentences[-1]
