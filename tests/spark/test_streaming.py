"""Tests of the data source for streams: no row is lost or doubled, however the query stops or the journal changes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from taskqueue_core.errors import InvalidInput
from taskqueue_spark.batch_reader import spark_schema
from taskqueue_spark.journals.contract import HistoryMissing
from taskqueue_spark.offsets import Offsets
from taskqueue_spark.source import TaskQueueDataSource
from taskqueue_spark.stream_reader import JournalStream
from tests.redis.servers import RedisServer
from tests.spark.journaling import START, Store, line

MINUTE = 60_000_000
ALL = ReadAllAvailable()


Streams = Callable[[dict[str, str]], JournalStream]


@pytest.fixture
def stream() -> Iterator[Streams]:
    """Yield a function that creates stream readers as Spark does."""
    with ExitStack() as made:

        def make(options: dict[str, str]) -> JournalStream:
            found = TaskQueueDataSource(options).streamReader(spark_schema())
            assert isinstance(found, JournalStream)
            made.callback(found.stop)
            return found

        yield make


def step(
    reader: JournalStream, start: dict[str, Any], limit: ReadLimit = ALL
) -> tuple[dict[str, Any], list[str]]:
    """Read a micro-batch, and return its end and the task ids in it; damage has an empty id."""
    end = reader.latestOffset(start, limit)
    return end, between(reader, start, end)


def between(reader: JournalStream, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    """Return the task ids between two offsets, read with a pickled reader as Spark's workers do."""
    worker = pickle.loads(pickle.dumps(reader))  # noqa: S301 - Spark pickles readers too
    found: list[str] = []
    for part in reader.partitions(start, end):
        for batch in worker.read(part):
            found += batch["task_id"].to_pylist()
    return found


@pytest.fixture
def store(redis_server: RedisServer, redis_prefix: str) -> Store:
    """Return an empty store with two partitions."""
    return Store(redis_server, redis_prefix, partitions=2)


def test_a_journal_is_read_as_it_grows(stream: Streams, store: Store) -> None:
    """Each batch contains new rows up to its limit, and the same offsets always give the same rows (G8, G11)."""
    reader = stream(store.options | {"maxEventsPerTrigger": "10"})
    assert reader.getDefaultReadLimit() == ReadMaxRows(10)
    limit = reader.getDefaultReadLimit()
    start = reader.initialOffset()
    assert step(reader, start, limit) == (start, [])
    store.write([(START + n, [f"a{n}"]) for n in range(30)])
    store.write([(START + 10 * n, [f"b{n}"]) for n in range(3)], 1)
    places, seen = [start], []
    while (told := step(reader, places[-1], limit))[0] != places[-1]:
        places.append(told[0])
        seen.append(told[1])
        assert len(told[1]) <= 10
    assert sorted(name for names in seen for name in names) == sorted(
        [*(f"a{n}" for n in range(30)), *(f"b{n}" for n in range(3))]
    )
    for number, names in enumerate(seen):
        assert between(stream(store.options), places[number], places[number + 1]) == names
    assert step(reader, start)[0] == places[-1]
    assert Offsets.of(reader.reportLatestOffset()) == Offsets.of(places[-1])
    reader.commit(places[-1])


def test_all_that_is_there_now_and_no_more(stream: Streams, store: Store) -> None:
    """With the trigger "available now", rows that are written after the start are left to the next query (G11)."""
    store.write([(START, ["a"])])
    reader = stream(store.options)
    assert reader.getDefaultReadLimit() == ALL
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    store.write([(START, ["b"])])
    store.write([(START, ["c"])], 1)
    end, names = step(reader, start)
    assert names == ["a"]
    assert step(reader, end) == (end, [])


def test_what_was_trimmed_is_missed(stream: Streams, store: Store) -> None:
    """If rows were trimmed before a stream has read them, it fails, or continues with the rest if allowed (G8, G11)."""
    store.write([(START + n, [f"t{n}"]) for n in range(100)])
    strict, loose = stream(store.options), stream(store.options | {"failOnDataLoss": "false"})
    start = strict.initialOffset()
    end = strict.latestOffset(start, ALL)
    parts = strict.partitions(start, end)
    store.call("", "XTRIM", store.journal(), "MINID", "41-0")
    with pytest.raises(HistoryMissing, match="1 to 40"):
        [batch for part in parts for batch in strict.read(part)]
    with pytest.raises(HistoryMissing, match="1 to 40"):
        strict.partitions(start, end)
    with pytest.raises(HistoryMissing, match="1 to 40"):
        strict.latestOffset(start, ALL)
    assert step(loose, start)[1] == [f"t{n}" for n in range(40, 100)]
    store.call("", "XDEL", store.journal(), "60-0")
    middle = {**end, store.names[0]: {"run": store.epoch, "next": 50}}
    with pytest.raises(HistoryMissing, match="60 to 60"):
        step(strict, middle)
    assert len(step(loose, middle)[1]) == 50


def test_damage_stops_no_stream(stream: Streams, store: Store) -> None:
    """A foreign entry is a row of damage, and its number does not count as missing (G8; fault L2)."""
    store.write([(START, ["a"])])
    store.call("", "XADD", store.journal(), "2-0", "f", "v")
    store.last[store.names[0]] = 2
    store.write([(START, ["b"])])
    reader = stream(store.options)
    assert sorted(step(reader, reader.initialOffset())[1]) == ["", "a", "b"]


def test_a_store_that_was_emptied_is_missed(stream: Streams, store: Store) -> None:
    """If the store was emptied, the stream fails, or reads the new journal from its start if allowed (G8, G11)."""
    store.write([(START, ["a"])])
    strict, loose = stream(store.options), stream(store.options | {"failOnDataLoss": "false"})
    start = step(strict, strict.initialOffset())[0]
    for name in store.names:
        store.call("", "DEL", f"{name}:meta", f"{name}:journal")
    again = Store(store.server, store.prefix, partitions=2)
    again.write([(START, ["b"])])
    with pytest.raises(HistoryMissing, match="start again"):
        strict.latestOffset(start, ALL)
    assert step(loose, start)[1] == ["b"]


def test_a_store_that_lost_its_latest_is_noticed(stream: Streams, store: Store) -> None:
    """A stream notices that a store lost its latest rows, even if numbers are reused (G8; faults F10, L2)."""
    store.write([(START + n, [f"old{n + 1}"]) for n in range(100)])
    strict, loose = stream(store.options), stream(store.options | {"failOnDataLoss": "false"})
    start = step(strict, strict.initialOffset())[0]
    former = {name: {**place, "mark": ""} for name, place in start.items()}
    store.call("", "DEL", store.journal())
    store.last[store.names[0]] = 0
    store.write([(START + n, [f"old{n + 1}"]) for n in range(80)])
    with pytest.raises(HistoryMissing, match="it ends at 81, but was read up to 101"):
        strict.latestOffset(start, ALL)
    back, names = step(loose, start)
    assert (back[store.names[0]]["next"], names) == (81, [""])
    store.write([(START + 1000 + n, [f"new{n + 81}"]) for n in range(40)])
    end = strict.latestOffset(start, ALL)
    with pytest.raises(HistoryMissing, match="already read"):
        between(strict, start, end)
    assert between(loose, start, end) == ["", *(f"new{n}" for n in range(101, 121))]
    assert step(loose, back)[1] == [f"new{n}" for n in range(81, 121)]
    assert step(strict, end) == (end, [])
    # Checkpoints of older versions have no mark.
    assert len(step(strict, former)[1]) == 20


def test_a_missing_end_is_reported(stream: Streams, store: Store) -> None:
    """If the last numbers of a batch are missing, a row with the next number reports them (G8, G11)."""
    store.write([(START + n, [f"t{n}"]) for n in range(10)])
    store.call("", "XADD", store.journal(), "*", "f", "v")
    store.call("", "HSET", f"{store.names[0]}:meta", "journal_seq", 60)
    reader = stream(store.options | {"failOnDataLoss": "false"})
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    rows = [
        row
        for part in reader.partitions(start, end)
        for batch in reader.read(part)
        for row in batch.to_pylist()
    ]
    assert [row["seq"] for row in rows] == [*range(1, 11), 61]
    assert (rows[-1]["event"], rows[-1]["run"]) == ("missing", store.epoch)
    assert step(reader, end) == (end, [])


def test_a_time_says_where_a_query_begins(stream: Streams, store: Store) -> None:
    """The start time applies to new queries only; a query with a checkpoint continues there (G8, G11)."""
    store.write([(START + n * 1_000_000, [f"t{n}"]) for n in range(10)])
    told = store.options | {"startingTimestamp": "2026-09-21T14:13:25Z"}
    reader = stream(told)
    start, names = step(reader, reader.initialOffset())
    assert names == [f"t{n}" for n in range(5, 10)]
    store.write([(START + n * 1_000_000, [f"t{n}"]) for n in range(10, 20)])
    later = stream(store.options | {"startingTimestamp": "2026-09-21T14:13:35Z"})
    assert step(later, start)[1] == [f"t{n}" for n in range(10, 20)]


def test_files_grow_come_and_go(stream: Streams, tmp_path: Path) -> None:
    """New files are read from their start, and a deleted or replaced file raises an error (G11; fault L2)."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(line(1) + line(2)[:20])
    strict = stream({"path": str(tmp_path)})
    loose = stream({"path": str(tmp_path), "failOnDataLoss": "false"})
    start, names = step(strict, strict.initialOffset())
    assert names == ["t1"]
    first.write_bytes(line(1) + line(2))
    second.write_bytes(line(5, "r2"))
    start, names = step(strict, start)
    assert names == ["t2", "t5"]
    first.write_bytes(line(7, "r3") + line(8, "r3") + line(9, "r3"))
    with pytest.raises(HistoryMissing, match="replaced"):
        strict.latestOffset(start, ALL)
    start, names = step(loose, start)
    assert names == ["t7", "t8", "t9"]
    second.unlink()
    with pytest.raises(HistoryMissing, match="no longer exists"):
        strict.latestOffset(start, ALL)
    assert step(loose, start) == (start, [])


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_file_that_was_renamed_is_known_again(stream: Streams, tmp_path: Path, fail: str) -> None:
    """Files that are rotated, renamed or moved are read on, without a lost or doubled row (G8, G11; fault L2)."""
    folder = tmp_path / "journals"
    folder.mkdir()
    options = {"path": str(folder), "failOnDataLoss": fail}
    now, older, oldest = (folder / name for name in ("journal.jsonl", "journal.1", "journal.2"))
    now.write_bytes(line(1) + line(2))
    reader = stream(options)
    start, names = step(reader, reader.initialOffset())
    assert names == ["t1", "t2"]
    now.write_bytes(now.read_bytes() + line(3))
    now.rename(older)
    now.write_bytes(line(1, "r2", task_id="u1"))
    second, names = step(reader, start)
    assert sorted(names) == ["t3", "u1"]
    older.write_bytes(older.read_bytes() + line(4))
    now.write_bytes(now.read_bytes() + line(2, "r2", task_id="u2"))
    planned = reader.latestOffset(second, ALL)
    older.rename(oldest)
    now.rename(older)
    # A planned batch and a batch already read give the same rows after the files were renamed.
    assert sorted(between(reader, second, planned)) == ["t4", "u2"]
    assert sorted(between(reader, start, second)) == ["t3", "u1"]
    third, names = step(stream(options), second)
    assert sorted(names) == ["t4", "u2"]
    assert third.keys() == {str(older), str(oldest)}
    moved = folder.rename(tmp_path / "moved") / "journal.1"
    moved.write_bytes(moved.read_bytes() + line(3, "r2", task_id="u3"))
    last, names = step(stream(options | {"path": str(moved.parent)}), third)
    assert (names, len(last)) == (["u3"], 2)
    again = stream(options | {"path": str(moved.parent), "startingOffsets": json.dumps(third)})
    assert step(again, again.initialOffset())[1] == ["u3"]


def test_a_file_whose_name_another_took(stream: Streams, tmp_path: Path) -> None:
    """If a rotation replaces the oldest file, a strict reader fails, and another one continues (G8, G11)."""
    now, older = tmp_path / "journal.jsonl", tmp_path / "journal.1"
    older.write_bytes(line(1, "r0", task_id="old"))
    now.write_bytes(line(1))
    strict = stream({"path": str(tmp_path)})
    loose = stream({"path": str(tmp_path), "failOnDataLoss": "false"})
    start = step(strict, strict.initialOffset())[0]
    now.rename(older)
    now.write_bytes(line(1, "r2", task_id="u1"))
    with pytest.raises(HistoryMissing, match="replaced"):
        strict.latestOffset(start, ALL)
    assert step(loose, start)[1] == ["u1"]


def test_a_stream_of_nothing_is_refused(stream: Streams, tmp_path: Path) -> None:
    """A path that does not exist is refused at each start, while an empty folder is accepted (G8, G11)."""
    reader = stream({"path": str(tmp_path / "nothing.jsonl")})
    for _ in range(2):
        with pytest.raises(InvalidInput, match="path: got a path that does not exist"):
            reader.initialOffset()
    with pytest.raises(InvalidInput, match="path"):
        stream({"path": str(tmp_path / "*.jsonl"), "failOnDataLoss": "false"}).latestOffset({}, ALL)
    empty = stream({"path": str(tmp_path)})
    assert step(empty, empty.initialOffset()) == ({}, [])
    for name, value in (("endingOffsets", "earliest"), ("pushdown", "true")):
        with pytest.raises(InvalidInput, match=name):
            stream({"path": str(tmp_path), name: value})


def test_a_shard_that_is_not_there_yet(stream: Streams, tmp_path: Path) -> None:
    """Starting offsets may name a file that does not exist yet, in addition to a start time (G8)."""
    (tmp_path / "a.jsonl").write_bytes(line(1) + line(2))
    coming = str(tmp_path / "b.jsonl")
    told = {"startingOffsets": json.dumps({coming: 0}), "startingTimestamp": "2026-09-21T14:13:22Z"}
    reader = stream({"path": str(tmp_path)} | told)
    start, names = step(reader, reader.initialOffset())
    assert names == ["t2"]
    Path(coming).write_bytes(line(3, "r2"))
    assert step(reader, start)[1] == ["t3"]


def test_only_journals_are_streams(stream: Streams) -> None:
    """Dead letters cannot be read as a stream (G8)."""
    with pytest.raises(InvalidInput, match="resource"):
        stream({"resource": "dead_letters"})


def started(
    frame: DataFrame, folder: Path, mode: str = "append", form: str = "parquet"
) -> StreamingQuery:
    """Run a query over the available rows, to its end."""
    writer = frame.writeStream.format(form).outputMode(mode).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start(
        str(folder / "out")
    )
    assert query.awaitTermination(150)
    return query


@pytest.mark.long  # tests with Spark what test_offsets.py tests without
def test_a_hot_shard_drops_nothing(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    """With a watermark, and one shard twenty times as busy as the other, no row is dropped as too late (G8, G11)."""
    store.write([(START + n * 100_000, [f"h{n}.{m}" for m in range(10)]) for n in range(1000)])
    store.write([(START + n * 2_000_000, [f"c{n}.{m}" for m in range(10)]) for n in range(50)], 1)
    frame = (
        spark.readStream.format("taskqueue")
        .options(**store.options, maxEventsPerTrigger=5000)
        .load()
    )
    windows = frame.withWatermark("ts", "5 seconds").groupBy(f.window("ts", "10 seconds"), "shard")
    query = started(windows.count().select("window.start", "shard", "count"), tmp_path)
    assert len(query.recentProgress) >= 3
    dropped = [
        operator["numRowsDroppedByWatermark"]
        for progress in query.recentProgress
        for operator in progress["stateOperators"]
    ]
    assert sum(dropped) == 0
    counts = spark.read.parquet(str(tmp_path / "out")).groupBy("shard").sum("count").collect()
    # The last window is not counted, because the watermark is five seconds behind the last row, at 99.9 s.
    assert sorted(counts) == [(0, 9 * 1000), (1, 9 * 50)]
    assert '"next": 10001' in query.recentProgress[-1]["sources"][0]["latestOffset"]


def test_a_query_goes_on_from_its_checkpoint(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    """A query that is stopped or killed before recording its batch reads each row once (G8, G11; fault L1)."""
    store.write([(START + n, [f"t{n}"]) for n in range(50)])

    def run() -> list[str]:
        frame = (
            spark.readStream.format("taskqueue")
            .options(**store.options, maxSpanPerTrigger="1h")
            .load()
        )
        started(frame.select("task_id"), tmp_path)
        return sorted(row.task_id for row in spark.read.parquet(str(tmp_path / "out")).collect())

    assert len(run()) == 50
    store.write([(START + n, [f"t{n}"]) for n in range(50, 80)])
    everything = run()
    assert len(everything) == len(set(everything)) == 80
    commits = sorted((tmp_path / "checkpoint/commits").iterdir())
    for file in commits:
        if "1" in file.name:  # matches the checksum file too
            file.unlink()
    store.write([(START + 80, ["t80"])])
    assert run() == sorted([*everything, "t80"])
    store.write([(START + n, [f"t{n}"]) for n in range(81, 100)])
    store.call("", "XTRIM", store.journal(), "MINID", "91-0")
    with pytest.raises(StreamingQueryException, match="82 to 90 no longer exist"):
        run()
