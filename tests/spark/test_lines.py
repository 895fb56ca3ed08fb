"""Tests of journals in files: valid lines are read, and all others are reported as damage."""

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
from taskqueue_spark.batch_reader import has_fewer_rows
from taskqueue_spark.columns import DAMAGED, MISSING, TRANSITIONS
from taskqueue_spark.journals.contract import Choice, HistoryMissing, Range, Watch
from taskqueue_spark.journals.lines import LinesJournal
from taskqueue_spark.options import ReadOptions
from tests.spark.journaling import START, line


def told(
    path: Path | str, *, torn: bool = True, choice: Choice | None = None
) -> list[dict[str, Any]]:
    """Read all rows of a journal, including damage."""
    rows = []
    with LinesJournal(str(path), torn=torn) as journal:
        for shard, span in journal.spans().items():
            part = Range(shard, span.run, span.first, span.end)
            rows += rows_of(journal.read(part, choice or Choice(), Watch.GAPS))
            rows += rows_of(journal.strays(part, choice or Choice()))
    return rows


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Return the rows of all batches."""
    return [row for batch in batches for row in batch.to_pylist()]


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    """Return the numbers of the valid transitions."""
    return [row["seq"] for row in rows if row["event"] not in {DAMAGED, MISSING}]


def reasons(rows: list[dict[str, Any]]) -> list[str]:
    """Return the reasons of the damaged rows, without the path and position."""
    return [row["reason"].split(": ")[-1] for row in rows if row["event"] == DAMAGED]


async def test_what_the_backend_writes_is_read(tmp_path: Path) -> None:
    """Every transition that the memory backend writes is read unchanged (G8)."""
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


def test_whether_there_are_few(tmp_path: Path) -> None:
    """Before Spark starts, it can be decided whether all files together have fewer than n rows (G8)."""
    for name, number in (("one", 3), ("two", 2)):
        (tmp_path / f"{name}.jsonl").write_bytes(
            b"".join(line(n + 1, run=name) for n in range(number))
        )
    options = ReadOptions.of({"backend": "lines", "path": str(tmp_path)})
    assert [has_fewer_rows(options, than) for than in (1, 3, 4, 5, 6)] == [False] * 4 + [True]


def test_damaged_lines_among_sound_ones(tmp_path: Path) -> None:
    """Torn, corrupt and foreign lines become rows of damage, and all other lines are read (G8, G9; fault L2)."""
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
    """The reason of a damaged line does not repeat its content, which may be secret."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1, event="secret") + line(2, worker=["secret"]) + b"secret\n")
    text = str(reasons(told(path)))
    assert "$.event" in text
    assert "secret" not in text


def test_a_torn_line_is_not_there_yet_until_its_file_is_still(tmp_path: Path) -> None:
    """A torn last line is ignored while its file may still be written to, and is damage later (fault L2)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + line(2)[:-10])
    assert (seqs(told(path)), reasons(told(path))) == ([1], [])
    os.utime(path, (1e9, 1e9))
    assert (seqs(told(path)), reasons(told(path))) == ([1], ["it has no line end"])
    assert reasons(told(path, torn=False)) == []
    path.write_bytes(line(1) + line(2))
    assert seqs(told(path)) == [1, 2]


def test_a_line_that_follows_a_torn_one_is_not_lost(tmp_path: Path) -> None:
    """If a process was killed while writing a line, the next process's first line is still read (fault L2)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + line(2)[:50] + line(1, "r2") + line(2, "r2"))
    rows = told(path)
    assert [(row["run"], row["seq"]) for row in rows if row["event"] == "published"] == [
        ("r1", 1), ("r2", 1), ("r2", 2),
    ]  # fmt: skip
    assert reasons(rows) == ["it is not JSON"]
    path.write_bytes(line(1) + line(2)[:50] + line(1, "r2")[:50] + line(1, "r3"))
    assert [row["run"] for row in told(path) if row["event"] == "published"] == ["r1", "r3"]


def test_what_may_be_missing_behind_a_run_is_reported(tmp_path: Path) -> None:
    """If a run ends with an unreadable line, one row may be missing after it, and this is reported (G9; fault L2)."""
    path = tmp_path / "journal.jsonl"
    runs = [
        line(1) + line(2),
        line(3)[:50],
        line(1, "r2"),
        b"garbage\n",
        line(1, "r3"),
        line(2, "r3"),
    ]
    path.write_bytes(b"".join(runs))
    behind = [("r1", 4, START + 2_000_000), ("r2", 3, START + 1_000_000)]

    def missing(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
        return [
            (row["run"], row["seq"], round(row["ts"].timestamp() * 1e6))
            for row in rows
            if row["event"] == MISSING
        ]

    assert missing(told(path)) == behind
    assert missing(told(path, choice=Choice(events=frozenset({"acked"})))) == []
    with LinesJournal(str(path), torn=False) as journal:
        ((shard, span),) = journal.spans().items()
        places = journal.split(shard, 0, span.end, 1000)
        rows: list[dict[str, Any]] = []
        for start, end in pairwise(places):
            part = Range(shard, span.run, start, end)
            rows += rows_of(journal.read(part, Choice(), Watch.GAPS))
        assert missing(rows) == behind
        whole = Range(shard, span.run, 0, span.end)
        assert rows_of(journal.strays(whole, Choice())) == []
    path.write_bytes(line(1) + line(2)[:50])
    assert missing(told(path)) == []
    os.utime(path, (1e9, 1e9))
    assert missing(told(path)) == [("r1", 3, START + 1_000_000)]
    path.write_bytes(b"garbage\n" * 20_000)
    assert missing(told(path)) == []


def test_numbers_that_are_not_there(tmp_path: Path) -> None:
    """A strict reader reports missing numbers within a run, except those that damage explains (G8; fault L2)."""
    path = tmp_path / "journal.jsonl"

    def read(*lines: bytes, start: int = 0, watch: Watch = Watch.GAPS) -> list[int]:
        path.write_bytes(b"".join(lines))
        journal = LinesJournal(str(path), torn=False)
        part = Range(str(path), "", start, path.stat().st_size)
        return seqs(rows_of(journal.read(part, Choice(events=frozenset({"published"})), watch)))

    assert read(line(7), line(8), line(3, "r2"), line(9), line(4, "r2")) == [7, 8, 3, 9, 4]
    assert read(line(1), line(2), line(1), line(2), line(3)) == [1, 2, 1, 2, 3]
    assert read(line(1), b"garbage\n", line(4), line(5)) == [1, 4, 5]
    with pytest.raises(HistoryMissing, match="2 to 3 of r1, 6 to 6 of r1 are missing"):
        read(line(1), line(4), line(5), line(7))
    assert read(line(1), line(3), watch=Watch.CUT) == [1, 3]
    first = len(line(1))
    with pytest.raises(HistoryMissing, match="2 to 2 of r1"):
        read(line(1), line(3), start=first)
    assert read(line(1), b"garbage\n", line(3), start=first + len(b"garbage\n")) == [3]


def test_damage_has_the_time_of_what_is_before(tmp_path: Path) -> None:
    """Damage gets the time of the row before it, or at a file's start that of the first row (G8; fault L2)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"a\n" + line(1) + b"b\n" + line(2) + line(3) + b"c\nd\n")
    expected = [START + 1_000_000, START + 1_000_000, START + 3_000_000, START + 3_000_000]
    with LinesJournal(str(path), torn=False) as journal:
        ((shard, span),) = journal.spans().items()
        for parts in (1, 2, 1000):
            rows: list[dict[str, Any]] = []
            for start, end in pairwise(journal.split(shard, 0, span.end, parts)):
                part = Range(shard, span.run, start, end)
                rows += rows_of(journal.read(part, Choice(), Watch.NOTHING))
            times = [row["ts"].timestamp() * 1e6 for row in rows if row["event"] == DAMAGED]
            assert times == expected


def test_lines_that_are_deep_or_long(tmp_path: Path) -> None:
    """A line with deep nesting or many repeated fields is damage, and does no other harm (G8; fault L2)."""
    path = tmp_path / "journal.jsonl"
    deep = b'{"v":2,"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n"
    many = b'{"v":' * 200_000 + b"\n"
    path.write_bytes(line(1) + deep + line(2) + many + line(3))
    rows = told(path)
    assert seqs(rows) == [1, 2, 3]
    assert reasons(rows) == ["it is not a transition", "it is not a transition - at `$.v`"]
    with LinesJournal(str(path), torn=False) as journal:
        assert journal.at(str(path), START + 2_000_000, 0, path.stat().st_size) <= len(
            line(1) + deep
        )


def test_a_time_is_that_of_a_transition(tmp_path: Path) -> None:
    """A search for a time ignores the times in invalid lines (G8; fault L2)."""
    path = tmp_path / "journal.jsonl"
    lines = [line(seq) for seq in range(1, 51)]
    lines[20] = b'{"ts": 9000000000}\n'
    lines[35] = b'{"ts": 5}\n'
    path.write_bytes(b"".join(lines))
    with LinesJournal(str(path), torn=False) as journal:
        for seq in (10, 20, 30, 40):
            found = journal.at(str(path), START + seq * 1_000_000, 0, path.stat().st_size)
            assert found == sum(map(len, lines[: seq - 1]))


def test_versions_of_lines_are_read_side_by_side(tmp_path: Path) -> None:
    """Lines of different versions can be mixed; fields that a version lacks are null (fault L2)."""
    old = line(1, v=1).replace(b', "ordering_key": null, "due_at": null', b"")
    assert b"due_at" not in old
    (tmp_path / "a.jsonl").write_bytes(old + line(2, ordering_key="o", due_at=START / 1e6))
    rows = told(tmp_path)
    assert [row["ordering_key"] for row in rows] == [None, "o"]
    assert rows[0]["due_at"] is None
    assert rows[1]["due_at"].timestamp() * 1e6 == START


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    """A path may be a file, a folder or a pattern; an empty or missing file has no rows (fault L2)."""
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
    """However a file is split, each line belongs to exactly one part (G8)."""
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
    """Positions by number of rows and by time are found even if damaged lines are in between (G8)."""
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
                # A line without a valid time may count as before or after the searched time.
                found = {begins[number], begins[40]} if number == 41 else {begins[number]}
                assert journal.at(shard, time, 0, span.end) in found
                assert journal.at(shard, time - 1, 0, span.end) in found
                assert journal.time(shard, begins[number]) == (time if number < 100 else None)
        assert journal.time(shard, begins[40]) == START + 42_000_000


def test_a_file_that_was_replaced_or_cut_is_missed(tmp_path: Path) -> None:
    """If a file was replaced, cut or deleted, the read fails, or returns nothing if the options allow that (G8)."""
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
    with pytest.raises(HistoryMissing, match="no longer exists"):
        rows_of(journal.read(part, Choice(), Watch.CUT))
    assert rows_of(journal.read(part, Choice(), Watch.NOTHING)) == []
    assert rows_of(journal.strays(part, Choice())) == []


def test_only_what_is_wanted(tmp_path: Path) -> None:
    """A read can be limited to events, keys, times and columns (G8)."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(1) + line(2, event="acked") + line(3, key="other") + b"garbage\n")
    assert seqs(told(path, choice=Choice(events=frozenset({"acked"})))) == [2]
    assert seqs(told(path, choice=Choice(keys=frozenset({"other"})))) == [3]
    assert seqs(told(path, choice=Choice(since=START + 2_000_000, until=START + 3_000_000))) == [2]
    columns = pa.schema([TRANSITIONS.field("seq"), TRANSITIONS.field("event")])
    assert told(path, choice=Choice(columns))[0] == {"seq": 1, "event": "published"}
    # Damage has no key; it is read if its event is requested, or if the events are not limited.
    for events, number in (({DAMAGED}, 1), ({DAMAGED, "acked"}, 2), ({"acked"}, 1)):
        assert len(told(path, choice=Choice(events=frozenset(events)))) == number
    assert reasons(told(path, choice=Choice(events=frozenset({DAMAGED})))) == ["it is not JSON"]
    assert reasons(told(path, choice=Choice(keys=frozenset({"", "work"})))) == ["it is not JSON"]


def test_a_time_in_the_future_is_damage(tmp_path: Path) -> None:
    """Fault L1 (G8): a line from the year 5000 is damaged, in a block of valid lines and alone; a due time is not."""
    future = 95_617_584_000.0
    text = [line(1), line(2, ts=future), line(3, due_at=future, state="scheduled")]
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(text))
    rows = told(path)
    assert (seqs(rows), reasons(rows)) == ([1, 3], ["its time is in the future"])
