"""Tests of the digests of journal files: changes that leave consistent numbers and histories are found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend, MemorySettings
from taskqueue_spark.journals.digests import check_digests
from taskqueue_spark.report.outcome import outcome_of
from tests.cli.conftest import Cli
from tests.spark.report_sample import conserved, total
from tests.spark.test_cli import _nowhere, cli, on_spark
from tests.spark.test_lines import reasons, seqs, told

__all__ = ["_nowhere", "cli", "on_spark"]

Lines = list[bytes]


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


def renumbered(lines: Lines) -> Lines:
    """Remove a whole task, and number the other lines without a gap."""
    kept = [json.loads(line) for line in lines if b'"task_id":"t2"' not in line]
    for number, line in enumerate(kept[:-1], start=1):
        line["seq"] = number
    kept[-1]["end"] = len(kept) - 1
    return [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in kept]


def swapped(lines: Lines) -> Lines:
    """Turn the last ack into a dead letter."""
    return [
        *lines[:-2],
        lines[-2].replace(b'"acked"', b'"dead_lettered"').replace(b'"done"', b'"dead"'),
        lines[-1],
    ]


def exchanged(lines: Lines) -> Lines:
    """Exchange the tasks of the first two lines."""
    first, second = (line.replace(b'"t0"', b'"?"') for line in lines[:2])
    return [
        first.replace(b'"?"', b'"t1"'),
        second.replace(b'"t1"', b'"t0"'),
        *lines[2:],
    ]


def stripped(lines: Lines) -> Lines:
    """Remove the digest of one line in the middle."""
    line = json.loads(lines[5])
    del line["digest"]
    return [*lines[:5], json.dumps(line, separators=(",", ":")).encode() + b"\n", *lines[6:]]


def test_what_is_written_is_sound(journal: Path) -> None:
    """G9: an unchanged journal, and a copy of it, match their digests; every line but the end mark is a transition."""
    found = check_digests(str(journal))
    assert (found.lines, found.altered, found.unfinished) == (16, 0, [])
    rows = told(journal)
    assert (seqs(rows), reasons(rows)) == ([*range(1, 17 - 1)], [])
    (journal.parent / "copy.jsonl").write_bytes(journal.read_bytes())
    assert check_digests(str(journal.parent)).altered == 0
    assert check_digests(str(journal.parent)).ends == found.ends


def test_another_process_continues_the_file(journal: Path) -> None:
    """G9: each run in a file has digests of its own, and a run without digests is not checked."""
    asyncio.run(_job(journal, digests=True))
    asyncio.run(_job(journal, digests=False))
    found = check_digests(str(journal))
    assert (found.lines, found.altered, len(found.ends), found.unfinished) == (32, 0, 2, [])
    assert len(seqs(told(journal))) == 45


@pytest.mark.parametrize("change", [renumbered, swapped, exchanged, stripped])
def test_a_consistent_change_is_found(journal: Path, change: Callable[[Lines], Lines]) -> None:
    """Fault L2 (G9): a removal with renumbering and a swapped outcome do not match the digests."""
    journal.write_bytes(b"".join(change(journal.read_bytes().splitlines(keepends=True))))
    found = check_digests(str(journal))
    assert found.altered
    assert found.first[0].file == "journal.jsonl"


def test_a_cut_at_the_end_of_a_line(journal: Path) -> None:
    """Fault L2 (G9): without its last lines, a journal has no end mark, and its last digest is another one."""
    whole = check_digests(str(journal))
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-3]))
    found = check_digests(str(journal))
    assert (found.altered, found.unfinished) == (0, [*whole.ends])
    assert found.ends != whole.ends
    journal.write_bytes(b"".join([*lines[:-3], lines[-1]]))
    assert check_digests(str(journal)).altered == 1


def test_gaps_and_damage_are_no_change(journal: Path) -> None:
    """Fault L1 (G9): a damaged line is reported as such, and the line after it is not called altered."""
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:30] + b"\n"
    journal.write_bytes(b"".join(lines))
    assert check_digests(str(journal)).altered == 0
    assert len(reasons(told(journal))) == 1


@pytest.mark.usefixtures("on_spark")
def test_the_audit_checks_digests(cli: Cli, journal: Path) -> None:
    """Fault L2 (G9): the audit of a file with a swapped outcome fails, also from its snapshot."""
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(swapped(lines)))
    for where in (["--journal", str(journal), "--out", "out"], ["--from", "out"]):
        done = cli("audit", *where, "--json")
        assert (done.code, done.told["verdict"]["kind"]) == (1, "altered"), done.err
        assert done.told["digests"]["first"][0]["seq"] == 15


def test_an_altered_journal_is_a_fault() -> None:
    """G9: altered lines fail; a missing end mark is only mentioned, because a killed process leaves none."""
    whole = total(conserved("k", published=1, completed=1))
    assert not outcome_of(whole, altered=1).ok
    open_end = outcome_of(whole, unfinished=1)
    assert open_end.ok
    assert "without an end mark" in open_end.sentences[-1]
