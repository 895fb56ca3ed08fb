"""A Redis store that was emptied, replaced or set up differently is detected and reported."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from taskqueue_core.errors import BackendUnavailable, ConfigurationError, LeaseLost
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.connection.errors import QueueReset
from taskqueue_redis.scripts.runner import LAYOUT
from tests.redis.backends import KEY, PATIENCE, keys_of, opened, publish, stream, take, until
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.servers import RedisServer


async def test_an_emptied_store(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str
) -> None:
    """Fault B12: after FLUSHALL each process raises `QueueReset` once, counts it in its health, and continues.

    Deliveries in flight are lost, so their receipts are revoked and stale.
    """
    with make_server(each_engine) as server:
        async with (
            opened(server.url, redis_prefix) as backend,
            opened(server.url, redis_prefix) as other,
        ):
            await publish(backend, "old", "older")
            async with backend.subscribe([KEY], "c") as consumer:
                (held,) = await take(consumer, 1)
                assert (await other.health()).details["resets"] == 0
                server.call("FLUSHALL")
                with pytest.raises(QueueReset, match="was emptied or replaced"):
                    await backend.publisher.publish(Task(key=KEY, id="new"))
                await publish(backend, "new")
                with pytest.raises(QueueReset):
                    await other.control.ledger(KEY)
                for each in (backend, other):
                    health = await each.health()
                    assert (health.ok, health.details["resets"]) == (True, 1)
                    ledger = await each.control.ledger(KEY)
                    assert (ledger.published, ledger.waiting) == (1, 1)
                (again,) = await take(consumer, 1)
                assert again.task.id == "new"
                assert await consumer.revoked() == (held.receipt,)
                with pytest.raises(LeaseLost):
                    await consumer.ack(held)
                await consumer.ack(again)
            assert (await backend.control.ledger(KEY)).done == 1


async def test_a_waiting_consumer_learns_of_it(make_server: MakeServer, redis_prefix: str) -> None:
    """Fault B12: a waiting consumer gets `QueueReset` with the next notification.

    After that it is registered in the new store.
    """
    with make_server() as server:
        async with (
            opened(server.url, redis_prefix) as other,
            opened(server.url, redis_prefix, lease=10 * PATIENCE) as backend,
            backend.subscribe([KEY], "c") as consumer,
        ):
            await consumer.receive(1, 0)
            waiting = asyncio.create_task(consumer.receive(1, None))
            await until(lambda: consumer.asleep, "it waits")
            server.call("FLUSHALL")
            await publish(other, "t")
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(QueueReset):
                    await waiting
            await take(consumer, 1)
            (worker,) = await other.control.workers()
            assert (worker.worker_id, worker.in_flight) == ("c", 1)


async def test_an_idle_consumer_registers_again(make_server: MakeServer, redis_prefix: str) -> None:
    """Fault B12, row U26: after FLUSHALL, idle consumers are listed again, those that have never received included.

    A receive that waits raises `QueueReset` without a notification, unless its process knows already.
    """
    with make_server() as server:
        async with (
            opened(server.url, redis_prefix) as other,
            opened(server.url, redis_prefix) as one,
            opened(server.url, redis_prefix) as two,
        ):
            async with one.subscribe([KEY], "idle") as idle, two.subscribe([KEY], "waits") as waits:
                await idle.adopt()
                await waits.receive(1, 0)
                waiting = asyncio.create_task(waits.receive(1, None))
                await until(lambda: waits.asleep, "it waits")
                server.call("FLUSHALL")

                async def listed() -> bool:
                    with contextlib.suppress(QueueReset):
                        workers = await other.control.workers()
                        return {each.worker_id for each in workers} == {"idle", "waits"}
                    return False

                await until(listed, "both are listed again")
                with pytest.raises(QueueReset):
                    await waiting
                await publish(two, "t")
                (delivery,) = await take(idle, 1)
                await idle.ack(delivery)
            assert await other.control.workers() == ()


async def test_a_master_that_restarts_empty(make_server: MakeServer, redis_prefix: str) -> None:
    """Fault C9: a master without persistence that restarts empty is reported as a reset."""
    with make_server(aof=False) as server:
        async with opened(server.url, redis_prefix) as backend:
            await publish(backend, "t")
            server.kill()
            server.start()
            with pytest.raises(QueueReset):
                await backend.control.ledger(KEY)
            assert (await backend.control.ledger(KEY)).published == 0
            assert (await backend.health()).details["resets"] == 1


async def test_a_lost_meta_hash(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """Fault B12: if only a partition's metadata are lost, one reset is reported, and all tasks are still executed."""
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "a", "b")
        async with backend.subscribe([KEY], "c") as consumer:
            (first,) = await take(consumer, 1)
            redis_server.call("DEL", f"{{{redis_prefix}:0}}:meta")
            with pytest.raises(QueueReset):
                await consumer.ack(first)
            await consumer.ack(first, *await take(consumer, 1))
            await publish(backend, "c")
            await consumer.ack(*await take(consumer, 1))
        ledger = await backend.control.ledger(KEY)
        assert (ledger.published, ledger.done) == (3, 3)
        assert (await backend.health()).details["resets"] == 1


async def test_a_lost_stream(redis_server: RedisServer, redis_url: str, redis_prefix: str) -> None:
    """Fault B12, rule 10: after a stream was deleted, waiting consumers get the tasks published later."""
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "a", "b")
        redis_server.call("DEL", stream(redis_prefix))
        async with backend.subscribe([KEY], "c") as consumer:
            assert (await consumer.receive(1, 0)).deliveries == ()
            waiting = asyncio.create_task(consumer.receive(1, None))
            await until(lambda: consumer.asleep, "it waits")
            await publish(backend, "c")
            async with asyncio.timeout(PATIENCE):
                assert [d.task.id for d in (await waiting).deliveries] == ["c"]


async def test_a_lost_group_is_made_again(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """Fault C6: a lost consumer group is created again from the first entry of its stream.

    Tasks that were in flight or waiting are delivered, and so are later ones.
    """
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "a", "b")
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(*await take(consumer, 1))
            await take(consumer, 1)
            await publish(backend, "c", "d")
            redis_server.call("XGROUP", "DESTROY", stream(redis_prefix), "g")
            found = await take(consumer, 3)
            assert [d.task.id for d in found] == ["b", "c", "d"]
            await consumer.ack(*found)
            await publish(backend, "e")
            await consumer.ack(*await take(consumer, 1))
        ledger = await backend.control.ledger(KEY)
        assert (ledger.done, ledger.waiting, ledger.in_flight) == (5, 0, 0)


async def test_forgotten_scripts(each_redis: RedisServer, redis_prefix: str) -> None:
    """Fault B13, FIX-C1, law 4: SCRIPT FLUSH between calls loses and duplicates no task, and keeps their order."""
    names = [f"t{n}" for n in range(1000)]
    async with opened(each_redis.url, redis_prefix) as backend:
        each_redis.call("SCRIPT", "FLUSH")
        await publish(backend, *names)
        async with backend.subscribe([KEY], "c") as consumer:
            each_redis.call("SCRIPT", "FLUSH")
            deliveries = await take(consumer, 1000)
            assert [delivery.task.id for delivery in deliveries] == names
            each_redis.call("SCRIPT", "FLUSH")
            await consumer.ack(*deliveries)
            each_redis.call("SCRIPT", "FLUSH")
            assert (await backend.control.maintain()).recovered == 0
        each_redis.call("SCRIPT", "FLUSH")
        ledger = await backend.control.ledger(KEY)
        assert (ledger.published, ledger.done) == (1000, 1000)
        assert (await backend.health()).details["resets"] == 0


async def test_a_foreign_layout_is_refused(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """D13, fault B9: a store written by another layout version or with another number of partitions is refused.

    The error names the remedy.
    """
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "t")
    async with opened(redis_url, redis_prefix, partitions=3) as backend:
        with pytest.raises(ConfigurationError, match="PARTITIONS=1, not 3: set it to 1"):
            await backend.publisher.publish(Task(key="other", id="t"))
        with pytest.raises(ConfigurationError, match="PARTITIONS=1"):
            await backend.control.ledger("other")
    redis_server.call("HSET", f"{{{redis_prefix}:0}}:meta", "layout", "0")
    async with opened(redis_url, redis_prefix) as backend:
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"layout 0.*TASKQUEUE_REDIS_PREFIX"):
                await backend.publisher.publish(Task(key=KEY, id="u"))
        health = await backend.health()
        assert not health.ok
        assert "layout 0" in str(health.details["error"])


@pytest.mark.parametrize("field", ["layout", "partitions", ""])
async def test_a_store_that_does_not_fit_later(
    redis_server: RedisServer,
    redis_url: str,
    redis_prefix: str,
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D13, fault B9: after the start, a store that another version or program has replaced is a logged outage."""
    meta = f"{{{redis_prefix}:0}}:meta"
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "t")
        keys = keys_of(redis_server, redis_prefix)
        redis_server.call("DEL", *keys)
        fields = {"epoch": "other", "layout": LAYOUT, "partitions": "1"} | {field: "9"}
        if field:
            redis_server.call("HSET", meta, *(word for pair in fields.items() for word in pair))
        else:
            redis_server.call("SET", meta, "x")
        for _ in range(3):
            with pytest.raises(BackendUnavailable):
                await backend.publisher.publish(Task(key=KEY, id="u"))
        assert ("the store" if field else "a script failed") in caplog.text
        redis_server.call("DEL", meta)
        await until(lambda: published(backend), "the store works again")


async def published(backend: RedisBackend) -> bool:
    """Return whether a task can be published."""
    with contextlib.suppress(BackendUnavailable):
        await publish(backend, "v")
        return True
    return False
