"""Tests of the data source for batch reads: partitions, filters and fixed ends."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
)
from pyspark.sql.types import StringType, StructField, StructType

from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_spark.batch_reader import FilteringReader, JournalReader, read_journal, spark_schema
from taskqueue_spark.columns import DAMAGED, MISSING, TRANSITIONS
from taskqueue_spark.journals.contract import HistoryMissing
from taskqueue_spark.options import ReadOptions
from taskqueue_spark.pipeline import tables
from taskqueue_spark.source import TaskQueueDataSource
from tests.redis.clusters import Cluster
from tests.redis.servers import RedisServer
from tests.spark.journaling import START, Store, line


def reader(options: dict[str, str]) -> JournalReader:
    """Create a batch reader as Spark does."""
    found = TaskQueueDataSource(options).reader(spark_schema())
    assert isinstance(found, JournalReader)
    return found


def numbers(options: dict[str, str], reading: JournalReader | None = None) -> list[int]:
    """Plan and read without Spark, and return the numbers of the valid transitions."""
    reading = reading or reader(options)
    found: list[int] = []
    for part in reading.partitions():
        for batch in reading.read(part):
            found += [row["seq"] for row in batch.to_pylist() if row["event"] != DAMAGED]
    return found


@pytest.fixture
def store(redis_server: RedisServer, redis_prefix: str) -> Store:
    """Return a store with a journal of 100 transitions, ten per second; every tenth is an ack."""
    store = Store(redis_server, redis_prefix)
    for n in range(0, 100, 10):
        ids = [f"t{n + m}" for m in range(9)]
        store.write([(START + n * 100_000, ids)])
        store.write(
            [(START + n * 100_000 + 1, [f"t{n}"])], event="acked", state="done", key="other"
        )
    return store


def test_where_it_begins_and_ends(store: Store) -> None:
    """Offsets and times select what is read, and a shard can be read in several parts (G8)."""
    name = store.names[0]
    assert numbers(store.options) == list(range(1, 101))
    assert numbers(store.options | {"splitsPerShard": "7"}) == list(range(1, 101))
    assert len(reader(store.options | {"splitsPerShard": "7"}).partitions()) == 7
    assert numbers(store.options | {"startingOffsets": "latest"}) == []
    places = {"startingOffsets": f'{{"{name}": 11}}', "endingOffsets": f'{{"{name}": 14}}'}
    assert numbers(store.options | places) == [11, 12, 13]
    times = {"startingTimestamp": "2026-09-21T14:13:25Z", "endingTimestamp": "2026-09-21T14:13:27Z"}
    since = datetime(2026, 9, 21, 14, 13, 25, tzinfo=UTC).timestamp() - START / 1e6
    assert numbers(store.options | times) == list(
        range(round(since * 10) + 1, round(since * 10) + 21)
    )
    assert numbers(store.options | {"events": "acked"}) == list(range(10, 101, 10))
    assert numbers(store.options | {"keys": "other,none"}) == list(range(10, 101, 10))


def test_what_was_pinned_and_is_cut_off_is_missed(store: Store) -> None:
    """If a part of the planned range is trimmed, the read fails, or returns the rest if the options allow that (G8)."""
    name = store.names[0]
    places = {"startingOffsets": f'{{"{name}": 11}}'}
    planned = reader(store.options | places)
    parts = planned.partitions()
    store.call("", "XTRIM", store.journal(), "MINID", "51-0")
    with pytest.raises(HistoryMissing, match="11 to 50"):
        [batch for part in parts for batch in planned.read(part)]
    with pytest.raises(HistoryMissing, match="11 to 50"):
        reader(store.options | places).partitions()
    assert numbers(store.options | places | {"failOnDataLoss": "false"}) == list(range(51, 101))
    planned = reader(store.options)
    parts = planned.partitions()
    store.call("", "XTRIM", store.journal(), "MINID", "71-0")
    # A read from the earliest offset accepts trimmed rows, which can be seen from the numbers.
    rows = [row for part in parts for batch in planned.read(part) for row in batch.to_pylist()]
    assert [row["seq"] for row in rows] == list(range(71, 101))


def test_an_end_that_is_cut_off_takes_nothing_along(store: Store) -> None:
    """A trimmed range raises an error only if there was something to read in it (G8)."""
    name = store.names[0]
    store.call("", "XTRIM", store.journal(), "MINID", "51-0")
    for end in (1, 40, 51):
        assert numbers(store.options | {"endingOffsets": f'{{"{name}": {end}}}'}) == []
    with pytest.raises(HistoryMissing, match="11 to 50"):
        numbers(
            store.options
            | {"startingOffsets": f'{{"{name}": 11}}', "endingOffsets": f'{{"{name}": 14}}'}
        )
    with pytest.raises(HistoryMissing, match="it ends at 101"):
        numbers(store.options | {"endingOffsets": f'{{"{name}": 140}}'})


def test_filters_narrow_what_is_read(store: Store) -> None:
    """A filter that the source applies completely is not returned to Spark, while others are applied again (G8)."""

    def narrowed(*filters: Filter) -> tuple[list[int], list[Filter]]:
        reading = FilteringReader(ReadOptions.of(store.options), spark_schema())
        rest = list(reading.pushFilters(list(filters)))
        return numbers(store.options, reading), rest

    assert narrowed(EqualTo(("event",), "acked")) == (list(range(10, 101, 10)), [])
    assert narrowed(In(("key",), ("other",)), EqualTo(("event",), "published")) == ([], [])
    low, high = (datetime.fromtimestamp(START / 1e6 + second, UTC) for second in (2, 3))
    times = [GreaterThanOrEqual(("ts",), low), LessThan(("ts",), high), IsNotNull(("tenant",))]
    found, rest = narrowed(*times)
    assert rest == times
    assert set(range(21, 31)) <= set(found) <= set(range(21, 40))


def test_filters_change_no_answer(store: Store) -> None:
    """Damage and missing numbers can be selected by their event, with a pushed-down filter or with an option (G8)."""
    store.call("", "XADD", store.journal(), "200-0", "f", "v")
    store.call("", "HSET", f"{store.names[0]}:meta", "journal_seq", 120)

    def events(*filters: Filter, **options: str) -> list[str]:
        reading = FilteringReader(ReadOptions.of(store.options | options), spark_schema())
        assert [*reading.pushFilters([*filters])] == []
        return sorted(
            event
            for part in reading.partitions()
            for batch in reading.read(part)
            for event in batch["event"].to_pylist()
        )

    assert events(EqualTo(("event",), DAMAGED)) == events(events=DAMAGED) == [DAMAGED]
    assert events(EqualTo(("event",), MISSING)) == events(events=MISSING) == [MISSING]
    assert events(In(("event",), ("acked", DAMAGED, MISSING))) == ["acked"] * 10 + [
        DAMAGED,
        MISSING,
    ]
    assert events(EqualTo(("event",), "acked"), EqualTo(("key",), "other")) == ["acked"] * 10


def test_columns_of_another_kind_are_refused() -> None:
    """A requested schema may only contain columns of the journal with their types (G8)."""
    for name, nullable in (("seq", True), ("nothing", True), ("tenant", False)):
        wrong = StructType([StructField(name, StringType(), nullable)])
        with pytest.raises(InvalidInput, match="schema"):
            JournalReader(ReadOptions.of({}), wrong)


def test_spark_reads_a_journal(spark: SparkSession, store: Store) -> None:
    """Spark finds the source by name, and reads all, selected or filtered rows up to an end (G8, G12)."""
    everything = spark.read.format("taskqueue").options(**store.options, splitsPerShard="2").load()
    assert everything.schema == spark_schema()
    table = everything.toArrow()
    assert table.schema.names == TRANSITIONS.names
    assert table.sort_by("seq")["seq"].to_pylist() == list(range(1, 101))
    few = spark.read.format("taskqueue").schema("task_id string, seq long").options(**store.options)
    assert few.load().agg(f.max("seq")).collect() == [(100,)]
    pinned = read_journal(spark, store.options, pushdown=True)
    store.write([(START * 2, ["late"])])
    assert pinned.count() == 100
    assert pinned.filter("event = 'acked' and seq > 50").count() == 5
    assert read_journal(spark, store.options).count() == 101


def test_spark_reports_what_is_wrong(spark: SparkSession, store: Store) -> None:
    """An error of the source reaches the user with its message (G8)."""
    with pytest.raises(
        PySparkException, match="fetchSize: got text that is not a whole number; allowed"
    ):
        spark.read.format("taskqueue").options(**store.options, fetchSize="x").load().collect()
    with pytest.raises(ConfigurationError, match="startingOffset"):
        read_journal(spark, store.options | {"startingOffset": "x"})


def test_spark_reads_a_cluster(
    spark: SparkSession, redis_cluster: Cluster, redis_prefix: str
) -> None:
    """All partitions of a cluster with three masters are read, each once (G8)."""
    store = Store(redis_cluster, redis_prefix, partitions=6)
    for number in range(6):
        store.write([(START, [f"t{number}.{n}" for n in range(50)])], number)
    found = read_journal(spark, store.options).groupBy("shard").agg(f.countDistinct("task_id"))
    assert sorted(found.collect()) == [(number, 50) for number in range(6)]


def test_spark_reads_files(spark: SparkSession, tmp_path: Path) -> None:
    """Damage is reported among valid lines, and copied lines count once (G8, G9; fault L2)."""
    lines = [line(seq) for seq in range(1, 51)]
    lines[20:21] = [b"garbage\n"]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "copy.jsonl").write_bytes(b"".join(lines[30:]))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    found = tables.distinct(read_journal(spark, {"path": str(tmp_path)})).groupBy("event").count()
    assert sorted(found.collect()) == [(DAMAGED, 1), ("published", 49)]
    (tmp_path / "none").mkdir()
    assert read_journal(spark, {"path": str(tmp_path / "none")}).count() == 0
    with pytest.raises(InvalidInput, match="path: got a path that does not exist"):
        read_journal(spark, {"path": str(tmp_path / "*.nothing")})


def test_what_a_stream_alone_has_is_refused() -> None:
    """An option for streams is refused in a batch read (G8)."""
    with pytest.raises(InvalidInput, match="maxEventsPerTrigger"):
        reader({"maxEventsPerTrigger": "5"})


def test_a_part_of_nothing_is_nothing() -> None:
    """Spark's own empty partition, which it adds if there is no other, has no rows (G8; fault L2)."""
    assert list(reader({"path": "/nowhere"}).read(InputPartition(None))) == []
