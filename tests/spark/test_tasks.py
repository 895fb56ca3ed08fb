"""Tests of reading dead letters and live tasks from the store, without Spark, on one server and on a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from pyspark.sql import types as spark
from pyspark.sql.datasource import InputPartition

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from taskqueue_spark import task_reader
from tests.redis.backends import opened, take
from tests.redis.clusters import Cluster
from tests.redis.servers import RedisServer

Rows = list[dict[str, Any]]


async def read(options: Mapping[str, str], *names: str) -> Rows:
    """Read a resource as Spark does, with all columns or the named ones."""
    schema = task_reader.TasksOptions.read(options).schema
    if names:
        schema = spark.StructType([schema[name] for name in names])
    reader = task_reader.StoreReader(options, schema)

    def rows() -> Rows:
        batches = (reader.read(partition) for partition in reader.partitions())
        return [row for some in batches for batch in some for row in batch.to_pylist()]

    # in a thread without an event loop, as in Spark's executors
    return await asyncio.to_thread(rows)


@asynccontextmanager
async def filled(url: str, prefix: str) -> AsyncIterator[RedisBackend]:
    """Yield a backend with tasks in every state; one task stays in flight until the end."""
    async with opened(url, prefix, lease=30) as backend, backend.subscribe(["k"], "w") as worker:
        await backend.publisher.publish(
            Task(key="k", id="flying"),
            Task(key="k", id="done"),
            Task(key="k", id="dead", tenant="acme", headers={"a": "b"}),
        )
        flying, done, dead = (await worker.receive(3, 5)).deliveries
        assert flying.task.id == "flying"
        await worker.ack(done)
        await worker.dead_letter(dead, "enough", "boom")
        await backend.publisher.publish(
            Task(key="k", id="later", not_before=backend.now() + 3600),
            Task(key="k", id="gone"),
            Task(key="k", id="first", priority=9),
            Task(key="k", id="o1", ordering_key="one"),
            Task(key="k", id="o2", ordering_key="one", tenant="acme"),
            *(Task(key=f"other{n % 3}", id=f"w{n}") for n in range(600)),
        )
        await backend.control.cancel("k", "gone")
        yield backend


async def test_live_tasks(redis_server: RedisServer, redis_prefix: str) -> None:
    """Live tasks are read once, ended ones on request, and consumer groups are not changed (G8)."""
    told = {"resource": "tasks", "url": redis_server.url, "prefix": redis_prefix}
    assert await read(told) == []
    async with filled(redis_server.url, redis_prefix):
        stream = f"{{{redis_prefix}:0}}:q:k/s5"
        before = redis_server.call("XINFO", "STREAM", stream, "FULL")
        found = {(row["key"], row["task_id"]): row for row in await read(told)}
        assert redis_server.call("XINFO", "STREAM", stream, "FULL") == before
        assert len(found) == 605
        states = {name: row["state"] for (key, name), row in found.items() if key == "k"}
        waiting = dict.fromkeys(("first", "o1", "o2"), "waiting")
        assert states == {"flying": "in_flight", "later": "scheduled", **waiting}
        second = found["k", "o2"]
        assert (second["tenant"], second["ordering_key"], second["attempt"]) == ("acme", "one", 1)
        assert second["since"] <= second["as_of"]
        assert found["k", "first"]["priority"] == 9
        ended = await read(told | {"states": "done,dead,cancelled", "keys": "k,none"}, "task_id")
        assert sorted(row["task_id"] for row in ended) == ["dead", "done", "gone"]
    with pytest.raises(InvalidInput, match="column payload"):
        task_reader.StoreReader(told, spark.StructType().add("payload", spark.BinaryType()))
    nobody = task_reader.StoreReader(told, task_reader.TASKS)
    assert list(nobody.read(InputPartition(None))) == []


async def test_live_tasks_of_as_many_partitions_as_there_are(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """The number of partitions is read from the store, even if the settings say otherwise (G8; fault L2)."""
    told = {"resource": "tasks", "url": redis_server.url, "prefix": redis_prefix}
    keys = [f"q{n}" for n in range(20)]
    async with opened(redis_server.url, redis_prefix, partitions=8) as backend:
        await backend.publisher.publish(*(Task(key=key, id=key) for key in keys))
    for partitions in ({}, {"partitions": "3"}):
        assert sorted(row["key"] for row in await read(told | partitions)) == sorted(keys)
        some = await read(told | partitions | {"keys": "q1,q7,q13"})
        assert [row["key"] for row in some] == ["q1", "q7", "q13"]


async def test_live_tasks_do_not_hold_redis_up(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """A long queue is listed in steps that each take Redis less than 5 ms (G8)."""
    told = {"resource": "tasks", "url": redis_server.url, "prefix": redis_prefix}
    async with (
        opened(redis_server.url, redis_prefix) as backend,
        backend.subscribe(["k"], "w") as w,
    ):
        for start in range(0, 10_000, 1000):
            named = (Task(key="k", id=f"t{n}") for n in range(start, start + 1000))
            await backend.publisher.publish(*named)
        flying = (await w.receive(500, 5)).deliveries
        limit = redis_server.call("CONFIG", "GET", "slowlog-log-slower-than")[1]
        redis_server.call("CONFIG", "SET", "slowlog-log-slower-than", 5000)
        tries = 0
        try:
            # a slow command would be slow each time, unlike one that only waited for the processor
            while True:
                redis_server.call("SLOWLOG", "RESET")
                found = await read(told, "task_id", "state")
                slow = redis_server.call("SLOWLOG", "GET", 100)
                tries += 1
                if not slow or tries == 5:
                    break
        finally:
            redis_server.call("CONFIG", "SET", "slowlog-log-slower-than", limit)
    states = {row["task_id"]: row["state"] for row in found}
    assert Counter(states.values()) == {"waiting": 9500, "in_flight": 500}
    assert {name for name, state in states.items() if state == "in_flight"} == {
        one.task.id for one in flying
    }
    assert slow == []


async def test_dead_letters(redis_server: RedisServer, redis_prefix: str) -> None:
    """All dead letters are read with payload and history, or with the requested columns (G8)."""
    told = {"resource": "dead_letters", "url": redis_server.url, "prefix": redis_prefix}
    async with filled(redis_server.url, redis_prefix) as backend:
        (row,) = await read(told)
        (letter,) = await backend.dead_letters.list("k")
    expected = {
        "key": "k", "task_id": "dead", "attempt": 1, "losses": 0, "reason": "enough", "payload": b"null",
        "headers": [("a", "b")], "priority": 5, "tenant": "acme", "ordering_key": None, "deadline": None,
        "max_attempts": None,
    }  # fmt: skip
    assert expected.items() <= row.items()
    assert row["failed_at"].timestamp() == pytest.approx(letter.failed_at)
    assert [(one["attempt"], one["error"]) for one in row["history"]] == [(1, "boom")]
    some = await read(told | {"KEYS": "k,other0"}, "reason", "task_id")
    assert some == [{"reason": "enough", "task_id": "dead"}]


async def test_dead_letters_while_some_are_redriven(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """Each dead letter is read once, even if a redrive makes the listing start again (G8; fault F19)."""
    told = {"resource": "dead_letters", "url": redis_server.url, "prefix": redis_prefix}
    async with (
        opened(redis_server.url, redis_prefix) as backend,
        backend.subscribe(["k"], "w") as w,
    ):
        await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(500)))
        for one in (await w.receive(500, 5)).deliveries:
            await w.dead_letter(one, "enough")
        reader = task_reader.StoreReader(
            told, spark.StructType([task_reader.DEAD_LETTERS["task_id"]])
        )
        (partition,) = await asyncio.to_thread(reader.partitions)
        pages = reader.read(partition)
        names = (await asyncio.to_thread(next, pages)).column(0).to_pylist()
        assert len(names) < 500
        assert await backend.dead_letters.redrive("k", names[-1], "t499") == 2
        for page in await asyncio.to_thread(list, pages):
            names += page.column(0).to_pylist()
    assert len(names) == 499
    assert set(names) == {f"t{n}" for n in range(499)}


async def test_dead_letters_of_shards_while_some_die(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that die in one shard during the listing hide no dead letter of another shard (G8; fault F19)."""
    monkeypatch.setattr(task_reader, "_PAGE", 1)
    told = {"resource": "dead_letters", "url": redis_server.url, "prefix": redis_prefix}
    async with opened(redis_server.url, redis_prefix) as inner:
        backend = ShardedBackend(inner)
        await backend.control.configure("spread", QueueSettings(shards=3))
        await backend.publisher.publish(*(Task(key="spread", id=f"t{n}") for n in range(30)))
        async with backend.subscribe(["spread"], "w") as worker:
            deliveries = [one for _ in range(6) for one in (await take(worker, 5))]
            *before, last = sorted(deliveries, key=lambda one: one.task.id in {"t0", "t1", "t2"})
            later = [last, before.pop(), before.pop()]
            for one in before:
                await worker.dead_letter(one, "enough")
            reader = task_reader.StoreReader(
                told, spark.StructType([task_reader.DEAD_LETTERS["task_id"]])
            )
            (partition,) = await asyncio.to_thread(reader.partitions)
            pages = reader.read(partition)
            names = (await asyncio.to_thread(next, pages)).column(0).to_pylist()
            for one in later:
                await worker.dead_letter(one, "enough")
            for page in await asyncio.to_thread(list, pages):
                names += page.column(0).to_pylist()
    assert len(names) == len(set(names))
    assert {f"t{n}" for n in range(3, 30)} <= set(names)


async def test_a_cluster_and_shards(redis_cluster: Cluster, redis_prefix: str) -> None:
    """All partitions of a cluster are read, and the tasks of a shard have the shard's name as key (G8)."""
    told = {"url": redis_cluster.url, "prefix": redis_prefix}
    async with opened(redis_cluster.url, redis_prefix) as inner:
        backend = ShardedBackend(inner)
        await backend.control.configure("spread", QueueSettings(shards=4))
        keys = [f"k{n}" for n in range(6)]
        await backend.publisher.publish(
            *(Task(key=key, id=f"t{n}") for n in range(20) for key in [*keys, "spread"])
        )
        async with backend.subscribe(["k0"], "w") as worker:
            for one in (await worker.receive(20, 5)).deliveries:
                await worker.dead_letter(one, "enough")
        live = await read(told | {"resource": "tasks"}, "key", "task_id")
        dead = await read(told | {"resource": "dead_letters"}, "key", "task_id")
    assert {(row["key"], row["task_id"]) for row in dead} == {("k0", f"t{n}") for n in range(20)}
    assert len(live) == 20 * 6
    shards = {row["key"] for row in live} - set(keys)
    assert len(shards) > 1
    assert all(name.startswith("spread:s") for name in shards)
