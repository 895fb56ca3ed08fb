"""Reading the journal: with a plain loop on hiredis and Arrow, with this project's reader, and with Spark."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import hiredis
import processes
import pyarrow as pa
import spark_stage
from pyspark.sql import SparkSession
from spark_sizes import Sizes

from taskqueue_spark.source import TaskQueueDataSource

_AT_ONCE = 2000
_PASSES = 3
_MICRO = 100
_BATCHES = 15
_WARM = 3
"""number of micro-batches before the first one that is measured"""


def measure(sizes: Sizes, turn: int) -> dict[str, list[float]]:
    """Return rates, their ratios to the plain loop, the time of Redis's longest command and of a micro-batch."""
    del turn
    found: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    with processes.RedisServer() as redis:
        single = spark_stage.fill(redis, "single", sizes.transitions, 1)
        hundred = spark_stage.fill(redis, "hundred", sizes.transitions, 100)
        spark_stage.fill(redis, "micro", _MICRO * _BATCHES, 1)
        readers: dict[str, tuple[Callable[[], int], int]] = {
            "plain loop, steps of 1 task": (lambda: _plain(redis.url, "single"), single),
            "our reader, steps of 1 task": (lambda: _ours(redis.url, "single"), single),
            "our reader, steps of 100 tasks": (lambda: _ours(redis.url, "hundred"), hundred),
        }
        with spark_stage.spark(1) as session:
            readers |= {
                "Spark on one core, steps of 1 task": (lambda: _spark(session, redis.url, "single", single), single),
                "Spark on one core, steps of 100 tasks": (
                    lambda: _spark(session, redis.url, "hundred", hundred),
                    hundred,
                ),
            }  # fmt: skip
            redis.ask("CONFIG", "SET", "slowlog-log-slower-than", "100")
            redis.ask("SLOWLOG", "RESET")
            # the first read of a session also loads what reading needs
            for prefix in ("single", "hundred"):
                _spark(session, redis.url, prefix, 0)
            found["Redis's longest command during a backfill, ms"] = [_longest(redis.url)]
            for _ in range(_PASSES):  # in turn, so that a slow minute affects all of them
                for name, (read, rows) in readers.items():
                    own, start = time.process_time(), time.perf_counter()
                    assert read() == rows, name
                    wall, cpu = time.perf_counter() - start, time.process_time() - own
                    found.setdefault(f"journal read: {name}, transitions/s", []).append(rows / wall)
                    spent.setdefault(name, []).append(cpu)
            found["micro-batch of 100 transitions, ms"] = _micro_batches(session, redis.url)
    plain, own = (spent[f"{name}, steps of 1 task"] for name in ("plain loop", "our reader"))
    spark = "journal read: {}, steps of 1 task, transitions/s"
    wall = zip(
        found[spark.format("Spark on one core")], found[spark.format("plain loop")], strict=True
    )
    return found | {
        # Use CPU time, which shows how much one core reads, whatever other processes do.
        "journal read per core: our reader, x plain loop": [
            one / other for one, other in zip(plain, own, strict=True)
        ],
        "journal read: Spark on one core, x plain loop": [one / other for one, other in wall],
    }


def _plain(url: str, prefix: str) -> int:
    """Read a stream with one entry per change of state into text columns, in the fastest way for a short script."""
    where = urlsplit(url)
    reader, rows, last = hiredis.Reader(), 0, "-"
    with socket.create_connection((where.hostname, where.port)) as link:

        def ask(start: str) -> None:
            link.sendall(
                hiredis.pack_command(
                    ("XRANGE", f"{{{prefix}:0}}:journal", start, "+", "COUNT", _AT_ONCE)
                )
            )

        ask(last)
        while entries := _answer(link, reader):
            ask(f"({entries[-1][0].decode()}")  # Redis prepares the next entries at the same time
            columns = zip(*(fields[1::2] for _, fields in entries), strict=True)
            arrays = [pa.array(values, pa.binary()).cast(pa.string()) for values in columns]
            names = [name.decode() for name in entries[0][1][::2]]
            rows += pa.RecordBatch.from_arrays(arrays, names=names).num_rows
    return rows


def _answer(link: socket.socket, reader: hiredis.Reader) -> Any:
    while (answer := reader.gets()) is False:
        reader.feed(link.recv(1 << 16))
    return answer


def _ours(url: str, prefix: str) -> int:
    source = TaskQueueDataSource({"url": url, "prefix": prefix, "splitsPerShard": "1"})
    reader = source.reader(source.schema())
    return sum(batch.num_rows for part in reader.partitions() for batch in reader.read(part))


def _spark(session: SparkSession, url: str, prefix: str, rows: int) -> int:
    options = {"url": url, "prefix": prefix, "splitsPerShard": "1"}
    journal = session.read.format("taskqueue").options(**options).load()
    journal.write.format("noop").mode("overwrite").save()
    return rows  # the format "noop" reports no number of rows, and counting them would read again


def _longest(url: str) -> float:
    with spark_stage.Redis.from_url(url) as link:
        reads = [one for one in link.slowlog_get(1000) if one["command"].startswith(b"X")]
    return max((one["duration"] for one in reads), default=100) / 1000


def _micro_batches(session: SparkSession, url: str) -> list[float]:
    with spark_stage.folder() as checkpoint:
        options = {"url": url, "prefix": "micro", "maxEventsPerTrigger": str(_MICRO)}
        stream = session.readStream.format("taskqueue").options(**options).load()
        query = (
            stream.writeStream.format("noop")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [median(list(_lasted(query.recentProgress))[_WARM:])]


def _lasted(progress: list[Any]) -> Iterator[float]:
    for one in progress:
        if one["numInputRows"]:
            yield float(one["durationMs"]["triggerExecution"])
