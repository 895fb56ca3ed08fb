"""Tests of redriving many dead letters with Spark, and of reading states and ledgers from the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as spark_types

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.tasks import Ledger, Task
from taskqueue_spark.redrive import Moved, RedriveWriter, redrive
from taskqueue_spark.store_tables import ledgers, live_states
from tests.redis.backends import opened
from tests.redis.servers import RedisServer

NUMBER = 1000


@pytest.fixture
def told(redis_server: RedisServer, redis_prefix: str) -> dict[str, str]:
    """Return the options of a store with many dead letters in two queues, and in a third one with two shards."""

    async def bury() -> None:
        async with opened(redis_server.url, redis_prefix) as inner:
            backend = ShardedBackend(inner)
            await backend.control.configure("spread", QueueSettings(shards=2))
            async with backend.subscribe(["a", "b", "spread"], "w") as worker:
                for key in ("a", "b", "spread"):
                    await backend.publisher.publish(
                        *(Task(key=key, id=f"t{n}") for n in range(NUMBER))
                    )
                left = 3 * NUMBER
                while left:
                    received = await worker.receive(500, 5)
                    for one in received.deliveries:
                        await worker.dead_letter(one, "enough")
                    left -= len(received.deliveries)

    asyncio.run(bury())
    return {"url": redis_server.url, "prefix": redis_prefix}


def ledger(told: dict[str, str], key: str) -> Ledger:
    """Return the ledger of a queue in the store."""

    async def ask() -> Ledger:
        async with opened(told["url"], told["prefix"]) as backend:
            return await ShardedBackend(backend).control.ledger(key)

    return asyncio.run(ask())


def test_a_thousand_redriven_twice(spark: SparkSession, told: dict[str, str]) -> None:
    """Dead letters selected by a read are redriven once, even if the redrive is repeated (G8; fault F19)."""
    reading = spark.read.format("taskqueue").options(**told, resource="dead_letters")
    letters = reading.option("keys", "a,b,spread").load().cache()
    try:
        assert letters.count() == 3 * NUMBER
        some = letters.where("key != 'b'").select("key", "task_id")
        assert redrive(some, **told) == Moved(2 * NUMBER, 0)
        assert redrive(some, **told) == Moved(0, 2 * NUMBER)
        states = live_states(some.limit(10), **told).select("state", "attempt").collect()
    finally:
        letters.unpersist()
    assert ledger(told, "a") == Ledger(published=NUMBER, waiting=NUMBER)
    assert ledger(told, "spread") == Ledger(published=NUMBER, waiting=NUMBER)
    assert ledger(told, "b") == Ledger(published=NUMBER, dead=NUMBER)
    assert [tuple(row) for row in states] == [("waiting", 1)] * 10
    rows = {row["key"]: row.asDict() for row in ledgers(spark, **told).collect()}
    shards = [row for key, row in rows.items() if key.startswith("spread:s")]
    assert len(shards) == 2
    assert sum(row["waiting"] for row in shards) == NUMBER
    assert rows["b"]["dead"] == rows["b"]["published"] == NUMBER


def batches(*pairs: tuple[str | None, str | None]) -> Iterator[pa.RecordBatch]:
    """Yield rows in a batch, as Spark does."""
    keys, ids = ([pair[place] for pair in pairs] for place in range(2))
    yield pa.record_batch(
        [pa.array(keys, pa.string()), pa.array(ids, pa.string())], ["key", "task_id"]
    )


def test_names_of_shards_and_unknown_names(told: dict[str, str]) -> None:
    """A shard's name means its queue, ids that are not dead are skipped, and no rows change nothing (G8)."""
    text = spark_types.StringType()
    schema = spark_types.StructType().add("key", text).add("task_id", text)
    writer = RedriveWriter(told, schema)
    assert writer.write(iter(())) == Moved(0, 0)
    assert writer.write(batches()) == Moved(0, 0)
    assert ledger(told, "a").dead == NUMBER
    shard = "spread:s1@1x2-0000"
    assert writer.write(batches((shard, "t1"), ("a", "t2"), ("a", "x"))) == Moved(2, 1)
    assert ledger(told, "spread").waiting == 1
    discarding = RedriveWriter(told | {"action": "discard", "queue": "b"}, schema)
    assert discarding.write(batches((None, "t1"), ("b", "t2"), ("a", "t2"))) == Moved(2, 1)
    assert ledger(told, "b") == Ledger(published=NUMBER, dead=NUMBER - 2, discarded=2)
    for key, task_id, field in ((None, "t3", "key"), ("a", None, "task_id")):
        with pytest.raises(InvalidInput, match=f"{field}: got NoneType"):
            writer.write(batches((key, task_id)))
    with pytest.raises(InvalidInput, match="column reason: got an unknown column"):
        RedriveWriter(told, spark_types.StructType([*schema.fields]).add("reason", text))
