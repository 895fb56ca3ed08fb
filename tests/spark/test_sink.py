"""Tests of the sink with Spark and a real store: failures, kills and replays lose no task and double none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, types

from taskqueue_spark.sink import writer as writing
from tests.redis.servers import RedisServer

_BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"
NUMBER = 6000
SCRIPT = Path(__file__).with_name("sink_to_kill.py")


@pytest.fixture
def told(redis_server: RedisServer, redis_prefix: str) -> dict[str, str]:
    """Return the options of an empty store."""
    return {"url": redis_server.url, "prefix": redis_prefix}


def tasks(spark: SparkSession, first: int = 0, end: int = NUMBER) -> DataFrame:
    """Return rows of tasks, in two partitions."""
    numbers = spark.range(first, end, 1, 2)
    return numbers.selectExpr(
        "concat('t', id) AS task_id", """concat('{"n":', id, '}') AS payload""", "'k' AS key"
    )


def keep(file: Path, first: int, end: int) -> None:
    """Write rows of tasks to a Parquet file."""
    numbers = range(first, end)
    rows = {
        "task_id": [f"t{n}" for n in numbers],
        "payload": [f'{{"n":{n}}}' for n in numbers],
        "key": ["k"] * len(numbers),
    }
    pq.write_table(pa.table(rows), file)


def expect(server: RedisServer, prefix: str, number: int = NUMBER) -> None:
    """Assert that the store contains each task exactly once."""
    entries = server.call("XRANGE", f"{{{prefix}:0}}:q:k/s5", "-", "+")
    found = [words[0].decode() for _, words in entries]
    assert len(found) == number
    assert set(found) == {f"t{n}" for n in range(number)}


@contextmanager
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Let Spark pass partitions in several small batches."""
    before = spark.conf.get(_BATCH)
    spark.conf.set(_BATCH, "500")
    try:
        yield
    finally:
        spark.conf.set(_BATCH, before or "10000")


def stream(
    spark: SparkSession,
    source: Path,
    checkpoint: Path,
    told: dict[str, str],
    form: str = "taskqueue",
    files: int = 1,
) -> None:
    """Publish the files of a folder as a stream, ``files`` per micro-batch, and wait for its end."""
    reading = spark.readStream.schema("task_id STRING, payload STRING, key STRING")
    rows = reading.option("maxFilesPerTrigger", str(files)).parquet(str(source))
    writing = rows.writeStream.format(form).options(**told)
    writing = writing.option("checkpointLocation", str(checkpoint))
    writing.trigger(availableNow=True).start().awaitTermination()


def test_a_write_whose_tasks_fail_and_are_killed(
    spark: SparkSession, told: dict[str, str], redis_server: RedisServer, redis_prefix: str
) -> None:
    """If a Spark task fails half-way, or its process is killed, each task is still stored once (G8; fault L1)."""
    spark.dataSource.register(_failing())
    with small_batches(spark):
        tasks(spark).write.format("failing").options(**told).mode("append").save()
    expect(redis_server, redis_prefix)


def _failing() -> type[Any]:  # noqa: C901 - contains two kinds of failure
    """Return a data source that fails on purpose. It is defined in a function, so that it is pickled by value."""
    from pyspark import TaskContext  # noqa: PLC0415

    from taskqueue_spark.source import TaskQueueDataSource  # noqa: PLC0415

    class Failing(TaskQueueDataSource):
        @classmethod
        def name(cls) -> str:
            return "failing"

        def writer(self, schema: Any, overwrite: bool) -> Any:  # noqa: FBT001
            writer: Any = super().writer(schema, overwrite)
            write = writer.write

            def failing(batches: Iterator[Any]) -> Any:
                context = TaskContext.get()
                assert context is not None

                def some() -> Iterator[Any]:
                    for number, batch in enumerate(batches):
                        if number == 3 and context.attemptNumber() == 0:
                            if context.partitionId() == 0:
                                raise RuntimeError("an accident")
                            os.kill(os.getpid(), signal.SIGKILL)
                        yield batch

                return write(some())

            writer.write = failing
            return writer

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: FBT001, N802
            writer: Any = super().streamWriter(schema, overwrite)
            commit = writer.commit

            def failing(messages: Any, batchId: int) -> None:  # noqa: N803
                commit(messages, batchId)
                if batchId == 1:
                    raise RuntimeError("an accident after the commit")

            writer.commit = failing
            return writer

    return Failing


def test_micro_batches_that_are_replayed(
    spark: SparkSession,
    told: dict[str, str],
    redis_server: RedisServer,
    redis_prefix: str,
    tmp_path: Path,
) -> None:
    """After a crash between the two commits, and after a lost checkpoint, no task is lost or doubled (G8; fault L1)."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    for first in range(0, NUMBER, NUMBER // 2):
        keep(source / f"{first}.parquet", first, first + NUMBER // 2)
    spark.dataSource.register(_failing())
    with pytest.raises(PySparkException, match="an accident after the commit"):
        stream(spark, source, checkpoint, told, "failing")
    assert (checkpoint / "offsets" / "1").exists()
    assert not (checkpoint / "commits" / "1").exists()
    stream(spark, source, checkpoint, told)
    expect(redis_server, redis_prefix)
    assert (checkpoint / "commits" / "1").exists()
    shutil.rmtree(checkpoint)
    stream(spark, source, checkpoint, told, files=2)
    expect(redis_server, redis_prefix)


def test_a_writer_that_is_killed(
    told: dict[str, str], redis_server: RedisServer, redis_prefix: str
) -> None:
    """After SIGKILL in the middle of a write, a complete repetition stores each task once (G8; fault L1)."""
    arguments = [sys.executable, str(SCRIPT), told["url"], told["prefix"]]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    before = redis_server.call("XLEN", f"{{{redis_prefix}:0}}:q:k/s5")
    assert 0 < before < NUMBER
    schema = types.StructType().add("task_id", types.StringType())
    rows = pa.table({"task_id": [f"t{n}" for n in range(NUMBER)]}).to_batches()
    writer = writing.writer(told | {"queue": "k"}, schema, overwrite=False)
    assert writer.write(iter(rows)) == writing.Sent(NUMBER - before, before)
    expect(redis_server, redis_prefix)


def test_what_a_job_says(
    spark: SparkSession,
    told: dict[str, str],
    redis_server: RedisServer,
    redis_prefix: str,
    tmp_path: Path,
) -> None:
    """A write returns counts, sets invalid rows aside, and reports errors before it writes (G8; fault L2)."""
    rows = tasks(spark, 0, 100).union(tasks(spark, 0, 20)).union(
        tasks(spark, 0, 3).selectExpr("'a b' AS task_id", "payload", "key")
    )  # fmt: skip
    aside = {"onInvalid": "skip", "invalidPath": str(tmp_path / "aside")}
    sent = writing.publish(rows, **told, **aside)
    assert (sent.confirmed, sent.duplicate, sent.invalid) == (100, 20, 3)
    expect(redis_server, redis_prefix, 100)
    rows.write.format("taskqueue").options(**told, **aside).mode("append").save()
    expect(redis_server, redis_prefix, 100)
    bad = pq.read_table(tmp_path / "aside").to_pydict()
    assert bad["task_id"] == ["a b"] * 6
    assert set(bad["payload"]) == {'{"n":0}', '{"n":1}', '{"n":2}'}
    before = set((tmp_path / "aside").iterdir())
    taken = tasks(spark, 0, 1).selectExpr("task_id", "'1' AS payload", "key")
    with pytest.raises(PySparkException, match="is already used in queue 'k'"):
        writing.publish(rows.union(taken), **told, **aside)
    assert set((tmp_path / "aside").iterdir()) == before
    with pytest.raises(PySparkException, match="unknown options: quue"):
        rows.write.format("taskqueue").options(**told, quue="k").mode("append").save()
