"""Journals in files: whatever stands in them, what is sound is read, and what is not is told."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend, MemorySettings
from taskqueue_spark.columns import DAMAGED, TRANSITIONS
from taskqueue_spark.journals import Choice, HistoryMissing, Range, Watch
from taskqueue_spark.journals.lines import LinesJournal
from tests.spark.journaling import START, line


def told(
    path: Path | str, *, torn: bool = True, choice: Choice | None = None
) -> list[dict[str, Any]]:
    """Read all there is."""
    rows = []
    with LinesJournal(str(path), torn=torn) as journal:
        for shard, span in journal.spans().items():
            part = Range(shard, span.run, span.first, span.end)
            rows += rows_of(journal.read(part, choice or Choice(), Watch.GAPS))
    return rows


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Return the rows of batches, each of which must have its schema."""
    return [row for batch in batches for row in batch.to_pylist()]


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of what is sound."""
    return [row["seq"] for row in rows if row["event"] != DAMAGED]


def reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Return what was told of the rest, without the place."""
    return [row["reason"].split(": ")[-1] for row in rows if row["event"] == DAMAGED]


async def test_what_the_backend_writes_is_read(tmp_path: Path) -> None:
    """Every transition that the memory backend has made is there, as it was (G8)."""
    path = tmp_path / "journal.jsonl"
    backend = MemoryBackend(settings=MemorySettings(journal=path))
    try:
        await backend.control.configure("work", QueueSettings(journal=True))
        await backend.publisher.publish(Task(key="work", id="t1", tenant="acme", priority=1))
        async with backend.subscribe(["work"], "w1") as subscription:
            (delivery,) = (await subscription.receive(1, 5)).deliveries
            await subscription.ack(delivery)
    finally:
        await backend.aclose()
    rows = await asyncio.to_thread(told, path)
    assert [row["event"] for row in rows] == ["configured", "published", "delivered", "acked"]
    assert seqs(rows) == [1, 2, 3, 4]
    published = rows[1]
    assert (published["tenant"], published["priority"], published["state"]) == (
        "acme",
        1,
        "waiting",
    )
    assert rows[2]["worker"] == "w1"
    assert {row["shard"] for row in rows} == {0}


def test_spoilt_lines_stand_beside_sound_ones(tmp_path: Path) -> None:
    """Torn, corrupt and foreign lines become rows of damage; all others are read (G8, G9; fault L2)."""
    spoilt = [
        b"garbage\n", b"\xff\xfe\x00\n", b'{"v":2}\n', b'{"hello":"world"}\n', b"[1,2]\n", line(-1),
        line(9, losses="9"), line(9, priority=1000), line(9, ts=1e300), line(9, event="damaged"), line(9, v=3),
        line(9, task_id=None), line(9, attempt=2**40), line(9, task_id="\ud800"), line(9, ts=None),
    ]  # fmt: skip
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + b"".join(spoilt) + b"\n  \n" + line(2) + b'{"v":2,"run":"r1","se')
    os.utime(path, (1e9, 1e9))
    rows = told(path)
    assert seqs(rows) == [1, 2]
    damaged = [row for row in rows if row["event"] == DAMAGED]
    assert len(damaged) == len(spoilt) + 1
    assert f"{path}: the line at byte {len(line(1))} cannot be read: it is not JSON" in [
        row["reason"] for row in damaged
    ]
    assert {(row["run"], row["seq"], row["task_id"]) for row in damaged} == {("", 0, "")}


def test_what_it_says_of_damage_holds_no_values(tmp_path: Path) -> None:
    """A line's own words are not repeated: they may be secret."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1, event="secret") + line(2, worker=["secret"]) + b"secret\n")
    text = str(reasons(told(path)))
    assert "$.event" in text
    assert "secret" not in text


def test_a_torn_line_is_not_there_yet_until_its_file_is_still(tmp_path: Path) -> None:
    """The end of a file that is written to is awaited; of one that is not, it is damage (fault L2)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + line(2)[:-10])
    assert (seqs(told(path)), reasons(told(path))) == ([1], [])
    os.utime(path, (1e9, 1e9))
    assert (seqs(told(path)), reasons(told(path))) == ([1], ["it has no end"])
    assert reasons(told(path, torn=False)) == []
    path.write_bytes(line(1) + line(2))
    assert seqs(told(path)) == [1, 2]


def test_a_line_that_follows_a_torn_one_is_not_lost(tmp_path: Path) -> None:
    """A process was killed within a line; the next one's first line is read all the same (fault L2)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + line(2)[:50] + line(1, "r2") + line(2, "r2"))
    rows = told(path)
    assert [(row["run"], row["seq"]) for row in rows if row["event"] != DAMAGED] == [
        ("r1", 1), ("r2", 1), ("r2", 2),
    ]  # fmt: skip
    assert reasons(rows) == ["it is not JSON"]


def test_versions_of_lines_are_read_side_by_side(tmp_path: Path) -> None:
    """What a version does not have is null (fault L2)."""
    old = line(1, v=1).replace(b', "ordering_key": null, "due_at": null', b"")
    assert b"due_at" not in old
    (tmp_path / "a.jsonl").write_bytes(old + line(2, ordering_key="o", due_at=START / 1e6))
    rows = told(tmp_path)
    assert [row["ordering_key"] for row in rows] == [None, "o"]
    assert rows[0]["due_at"] is None
    assert rows[1]["due_at"].timestamp() * 1e6 == START


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    """A path names one file, those of a folder or those of a pattern; empty ones have nothing (fault L2)."""
    (tmp_path / "a.jsonl").write_bytes(line(1))
    (tmp_path / "b.log").write_bytes(line(1, "r2"))
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / ".hidden").write_bytes(b"garbage\n")
    (tmp_path / "sub").mkdir()
    assert len(told(tmp_path)) == 2
    assert len(told(tmp_path / "*.jsonl")) == 1
    assert len(told(tmp_path / "b.log")) == 1
    assert told(tmp_path / "none") == told(tmp_path / "c.jsonl") == []


def test_any_part_of_a_file_is_read_once(tmp_path: Path) -> None:
    """However a file is split, each line is in one part, whole (G8)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(line(seq, error="x" * (seq % 50)) for seq in range(1, 201)))
    with LinesJournal(str(path), torn=False) as journal:
        ((shard, span),) = journal.spans().items()
        for parts in (1, 3, 7, 1000):
            places = journal.split(shard, 0, span.end, parts)
            found: list[int] = []
            for start, end in pairwise(places):
                part = Range(shard, span.run, start, end)
                found += seqs(rows_of(journal.read(part, Choice(rows=7), Watch.GAPS)))
            assert found == list(range(1, 201))


def test_places_by_rows_and_by_times(tmp_path: Path) -> None:
    """Where so many lines end, and where a time begins, is found among damage too (G8)."""
    path = tmp_path / "journal.jsonl"
    lines = [line(seq) for seq in range(1, 101)]
    lines[40] = b"garbage\n"
    path.write_bytes(b"".join(lines))
    with LinesJournal(str(path), torn=False) as journal:
        ((shard, span),) = journal.spans().items()
        begins = [sum(map(len, lines[:number])) for number in range(101)]
        for number in range(101):
            assert journal.after(shard, 0, number, span.end) == begins[number]
            assert journal.rows(shard, begins[number], span.end) == 100 - number
            time = START + (number + 1) * 1_000_000
            if number != 40:
                # What has no time is with those before it or with those after.
                found = {begins[number], begins[40]} if number == 41 else {begins[number]}
                assert journal.at(shard, time, 0, span.end) in found
                assert journal.at(shard, time - 1, 0, span.end) in found
                assert journal.time(shard, begins[number]) == (time if number < 100 else None)
        assert journal.time(shard, begins[40]) == START + 42_000_000


def test_a_file_that_was_replaced_or_cut_is_missed(tmp_path: Path) -> None:
    """What was to be read and is gone is an error, or nothing where that was asked for (G8)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + line(2))
    journal = LinesJournal(str(path), torn=False)
    ((shard, span),) = journal.spans().items()
    part = Range(shard, span.run, 0, span.end)
    path.write_bytes(line(1, "other") + line(2, "other"))
    with pytest.raises(HistoryMissing, match="replaced"):
        rows_of(journal.read(part, Choice(), Watch.CUT))
    assert rows_of(journal.read(part, Choice(), Watch.NOTHING)) == []
    path.write_bytes(line(1))
    with pytest.raises(HistoryMissing, match="ends before"):
        rows_of(journal.read(part, Choice(), Watch.CUT))
    path.unlink()
    with pytest.raises(HistoryMissing, match="gone"):
        rows_of(journal.read(part, Choice(), Watch.CUT))
    assert rows_of(journal.read(part, Choice(), Watch.NOTHING)) == []


def test_only_what_is_wanted(tmp_path: Path) -> None:
    """Events, keys, times and columns narrow what is read (G8)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + line(2, event="acked") + line(3, key="other") + b"garbage\n")
    assert seqs(told(path, choice=Choice(events=frozenset({"acked"})))) == [2]
    assert seqs(told(path, choice=Choice(keys=frozenset({"other"})))) == [3]
    assert seqs(told(path, choice=Choice(since=START + 2_000_000, until=START + 3_000_000))) == [2]
    columns = pa.schema([TRANSITIONS.field("seq"), TRANSITIONS.field("event")])
    assert told(path, choice=Choice(columns))[0] == {"seq": 1, "event": "published"}
    # What is damaged is of no key, and is told who asks for it, or for all events.
    for events, number in (({DAMAGED}, 1), ({DAMAGED, "acked"}, 2), ({"acked"}, 1)):
        assert len(told(path, choice=Choice(events=frozenset(events)))) == number
    assert reasons(told(path, choice=Choice(events=frozenset({DAMAGED})))) == ["it is not JSON"]
    assert reasons(told(path, choice=Choice(keys=frozenset({"", "work"})))) == ["it is not JSON"]
