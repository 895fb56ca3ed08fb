"""Tests of writing one partition to a real store, without Spark: order, full queues, rates, outages and repetitions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import types as spark

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    IdConflict,
    PublishUnconfirmed,
    QueueFull,
)
from taskqueue_core.tasks import Published, Task
from taskqueue_redis.journal.reader import RedisJournalReader, entries_of
from taskqueue_spark.sink import feed as feed_module
from taskqueue_spark.sink import writer as writing
from taskqueue_spark.sink.feed import Feed
from taskqueue_spark.sink.options import SinkOptions
from taskqueue_spark.sink.store import SparkStore
from tests.redis.backends import until
from tests.redis.clusters import Cluster
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

LARGE = b'"' + b"x" * 199_998 + b'"'
SCHEMA = spark.StructType().add("task_id", spark.StringType()).add("key", spark.StringType())


@pytest.fixture
def told(redis_server: RedisServer, redis_prefix: str) -> dict[str, str]:
    """Return the options of an empty store."""
    return {"url": redis_server.url, "prefix": redis_prefix}


def rows(number: int, key: str = "k", start: int = 0) -> list[pa.RecordBatch]:
    """Return rows in batches, as Spark passes them."""
    ids = [f"t{n}" for n in range(start, start + number)]
    table = pa.table({"task_id": ids, "key": [key] * number})
    return [*table.to_batches(max_chunksize=700)]


def write(options: dict[str, str], batches: Sequence[pa.RecordBatch]) -> writing.Sent:
    """Write rows as Spark does for one partition."""
    sent = writing.writer(options, SCHEMA, overwrite=False).write(iter(batches))
    assert isinstance(sent, writing.Sent)
    return sent


async def feed(backend: Backend, options: SinkOptions, tasks: list[Task]) -> Feed:
    """Send tasks in chunks to the backend, and return the feed with its counts."""
    async with Feed(backend, options) as feeding:
        for start in range(0, len(tasks), options.chunk):
            await feeding.send(tasks[start : start + options.chunk])
    return feeding


def test_the_same_rows_again(told: dict[str, str]) -> None:
    """A second attempt, and a speculative copy running at the same time, store no task twice (G8; fault L1)."""
    batches, sent = rows(3000), []
    twins = [threading.Thread(target=lambda: sent.append(write(told, batches))) for _ in range(2)]
    for twin in twins:
        twin.start()
    for twin in twins:
        twin.join()
    assert sum(one.confirmed for one in sent) == 3000
    assert sum(one.duplicate for one in sent) == 3000
    again = write(told, batches)
    assert (again.confirmed, again.duplicate) == (0, 3000)
    other = [batch.append_column("payload", pa.array(["1"] * batch.num_rows)) for batch in rows(5)]
    wider = spark.StructType([*SCHEMA.fields, spark.StructField("payload", spark.StringType())])
    with pytest.raises(IdConflict, match="set the option onConflict=count"):
        writing.writer(told, wider, overwrite=False).write(iter(other))
    counting = writing.writer(told | {"onConflict": "count"}, wider, overwrite=False)
    assert counting.write(iter(other)) == writing.Sent(conflict=5)


async def test_a_full_queue_is_waited_for(told: dict[str, str]) -> None:
    """If a queue is full, its tasks wait in order and none is lost, while other queues continue (G8)."""
    options = SinkOptions.read(told | {"chunkSize": "50"})
    async with options.store.opened() as backend:
        await control_of(backend).configure("k", QueueSettings(capacity=60))
        got: list[str] = []

        async def consume() -> None:
            async with backend.subscribe(["k"], "w") as subscription:
                while len(got) < 1000:
                    received = await subscription.receive(25, 5)
                    got.extend(one.task.id for one in received.deliveries)
                    await subscription.ack(*received.deliveries)

        tasks = [Task(key="k", id=f"t{n:04}") for n in range(500)]
        tasks += [Task(key="free", id=f"f{n}") for n in range(100)]
        tasks += [Task(key="k", id=f"t{n:04}") for n in range(500, 1000)]
        feeding = asyncio.create_task(feed(backend, options, tasks))
        async with backend.subscribe(["free"], "v") as passing:
            passed = 0
            while passed < 100:
                received = await passing.receive(100, 5)
                passed += len(await passing.ack(*received.deliveries))
        assert not feeding.done()
        consuming = asyncio.create_task(consume())
        done = await feeding
        await consuming
        assert got == [f"t{n:04}" for n in range(1000)]
        assert done.counts[Published.ACCEPTED] == 1100
        assert done.counts[Published.REFUSED] > 0


async def test_patience_ends(told: dict[str, str]) -> None:
    """If a queue makes no progress for ``wait`` seconds the write fails, and at once if the queue has moved (G8)."""
    options = SinkOptions.read(told | {"wait": "0.2"})
    async with options.store.opened() as backend:
        settings = await control_of(backend).configure("k", QueueSettings(capacity=10))
        with pytest.raises(QueueFull, match=r"for 0\.2 s without any progress \(option wait\)"):
            await feed(backend, options, [Task(key="k", id=f"t{n}") for n in range(11)])
        moved = settings.model_copy(update={"moved_to": "other"})
        await control_of(backend).configure("k", moved)
        with pytest.raises(QueueFull, match="queue 'k' refused tasks: "):
            await feed(backend, SinkOptions.read(told), [Task(key="k", id="t99")])


async def test_lost_answers_are_asked_for_again(told: dict[str, str]) -> None:
    """If the store's responses are lost, repeated tasks count as duplicates but are stored once (G8)."""
    options = SinkOptions.read(told)
    async with options.store.opened() as backend:
        publisher: Any = backend.publisher
        publish, calls = publisher.publish, 0

        async def flaky(*tasks: Task) -> Any:
            nonlocal calls
            answers = await publish(*tasks)
            calls += 1
            if calls < 6:
                raise PublishUnconfirmed("the store's response was lost")
            return answers

        publisher.publish = flaky
        done = await feed(backend, options, [Task(key="k", id=f"t{n}") for n in range(300)])
        assert done.counts == {Published.ACCEPTED: 50, Published.DUPLICATE: 250}
        assert (await control_of(backend).ledger("k")).published == 300


def test_a_horizon_is_checked(told: dict[str, str]) -> None:
    """``replayHorizon`` is checked before the first write, or before a queue's first task (G8)."""
    options = told | {"replayHorizon": "86400"}
    words = "queue 'k' remembers the ids of ended tasks for 300 s, .* increase its dedupe_window"
    with pytest.raises(ConfigurationError, match=words):
        writing.writer(options | {"queue": "k"}, SCHEMA, overwrite=False)
    with pytest.raises(ConfigurationError, match=words):
        write(options, rows(5))
    assert write(told | {"replayHorizon": "300"}, rows(5)).confirmed == 5


def test_a_rate_is_kept(told: dict[str, str]) -> None:
    """A rate limit is divided between the partitions that write at the same time (G8)."""
    began = time.monotonic()
    options = told | {"rateLimit": "1000", "writers": "2", "chunkSize": "50"}
    assert write(options, rows(200)).confirmed == 200
    assert time.monotonic() - began >= 0.3  # the last of four chunks is sent after three intervals


def test_bad_rows(told: dict[str, str], tmp_path: Any) -> None:
    """Invalid rows fail the job, or are skipped, counted and set aside (G8; fault L2)."""
    bad = [pa.record_batch({"task_id": ["a", "b c", "d"], "key": ["k", "k", None]})]
    with pytest.raises(ValueError, match="id: got str of length 3"):
        write(told, bad)
    options = told | {"onInvalid": "skip", "invalidPath": str(tmp_path)}
    writer = writing.writer(options, SCHEMA, overwrite=False)
    sent = writer.write(iter(bad))
    assert isinstance(sent, writing.Sent)
    assert (sent.confirmed, sent.invalid) == (1, 2)
    # Simulate a slower copy of the Spark task, and one that was killed.
    assert isinstance(writer.write(iter(bad)), writing.Sent)
    assert len(list(tmp_path.iterdir())) == 2
    writer.commit([sent, None])
    (file,) = tmp_path.iterdir()
    assert not file.name.startswith(".")
    writer.write(iter(bad))
    writer.abort([])
    assert list(tmp_path.iterdir()) == [file]


def test_a_wrong_address_fails_at_once(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the store was never reachable, a write fails at once instead of waiting for an hour (G8)."""
    monkeypatch.setenv("TASKQUEUE_REDIS_OPERATION_TIMEOUT", "0.2")
    nowhere = told | {"url": "redis://127.0.0.1:1"}
    with pytest.raises(
        BackendUnavailable, match="nothing was written, because the store is unavailable"
    ):
        writing.writer(nowhere, SCHEMA, overwrite=False)


class Context:
    """A replacement for Spark's context of a streaming task."""

    def __init__(self, batch: str) -> None:
        self.batch = batch

    def getLocalProperty(self, name: str) -> str:  # noqa: N802 - Spark's interface has this name
        """Return a property of the streaming query."""
        return {"sql.streaming.queryId": "q", "streaming.sql.batchId": self.batch}[name]

    def partitionId(self) -> int:  # noqa: N802 - Spark's interface has this name
        """Return the number of the partition."""
        return 0


def test_a_stream_to_a_wrong_address_fails_at_once(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch of a stream fails at once if the store was never reachable; later batches wait (G8; fault L2)."""
    monkeypatch.setenv("TASKQUEUE_REDIS_OPERATION_TIMEOUT", "0.2")
    nowhere = told | {"url": "redis://127.0.0.1:1"}
    for batch, options, error in (
        ("0", nowhere, "nothing was written, because the store is unavailable"),
        ("7", nowhere | {"wait": "0"}, "(?!nothing was written)"),
    ):
        monkeypatch.setattr(TaskContext, "get", lambda batch=batch: Context(batch))
        writer = writing.writer(options, SCHEMA, overwrite=False, stream=True)
        with pytest.raises(BackendUnavailable, match=error):
            writer.write(iter(rows(5)))
    monkeypatch.setattr(TaskContext, "get", lambda: Context("0"))
    sent = writing.writer(told, SCHEMA, overwrite=False, stream=True).write(iter(rows(5)))
    assert isinstance(sent, writing.Sent)
    assert (sent.confirmed, sent.query) == (5, "q")


async def test_large_payloads(told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A publish contains at most a megabyte of payloads, and tasks held for a full queue are limited in bytes (G8)."""
    monkeypatch.setattr(feed_module, "_HELD_BYTES", 3_000_000)
    options = SinkOptions.read(told)
    async with options.store.opened() as backend:
        control = control_of(backend)
        settings = await control.configure("full", QueueSettings(capacity=2))
        large = [Task(key="k", id=f"t{n}", payload=LARGE) for n in range(10)]
        sizes: list[int] = []
        insist = Feed._retry_until_available

        async def insisted(self: Feed, tasks: Sequence[Task], wait: float) -> Any:
            sizes.append(sum(len(task.payload) for task in tasks))
            return await insist(self, tasks, wait)

        monkeypatch.setattr(Feed, "_retry_until_available", insisted)
        feeding = await feed(backend, options, large)
        assert feeding.counts[Published.ACCEPTED] == 10
        assert sum(sizes) == 2_000_000
        assert max(sizes) <= 1_048_576
        async with Feed(backend, options) as feeding:
            many = [Task(key="full", id=f"t{n}", payload=LARGE) for n in range(40)]
            sending = asyncio.create_task(feeding.send(many))
            await until(lambda: feeding._bytes > 3_000_000)
            assert not sending.done()
            assert feeding._bytes < 4_500_000
            await control.configure("full", settings.model_copy(update={"capacity": 99}))
            await sending
        assert feeding.counts[Published.ACCEPTED] == 40
        assert feeding._bytes == 0


async def test_a_cluster_and_its_journals(redis_cluster: Cluster, redis_prefix: str) -> None:
    """Rows of several queues are written to a cluster's partitions once each, and to the journals (G8)."""
    told = {"url": redis_cluster.url, "prefix": redis_prefix}
    keys = [f"k{n}" for n in range(8)]
    async with SparkStore.read(told).opened() as backend:
        for key in keys:
            await control_of(backend).configure(key, QueueSettings(journal=True))
    table = pa.table({"task_id": [f"t{n}" for n in range(800)], "key": keys * 100})
    for confirmed, duplicate in ((800, 0), (0, 800)):
        sent = await asyncio.to_thread(write, told, table.to_batches())
        assert (sent.confirmed, sent.duplicate) == (confirmed, duplicate)
    published = 0
    async with RedisJournalReader(settings_for(redis_cluster.url, prefix=redis_prefix)) as journal:
        for partition in journal.partitions:
            span = await journal.span(partition)
            async for reply in journal.read(partition, span.first, span.last):
                steps = entries_of(reply)
                published += sum(one.size for one in steps if one.values[2] == b"published")
    assert published == 800
