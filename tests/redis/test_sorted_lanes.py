"""Sorted lanes, which hold the waiting tasks in fair order, while their entries stay in the streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from taskqueue_core.capabilities import Order
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Published, Settled, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, publish, stream, take
from tests.redis.recount import recounted
from tests.redis.resp import Resp
from tests.redis.servers import RedisServer


@pytest.fixture
async def backend(each_redis: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend whose queue is in fair order."""
    async with opened(each_redis.url, redis_prefix) as backend:
        await order(backend, Order.FAIR)
        yield backend


@pytest.fixture
def raw(each_redis: RedisServer) -> Iterator[Resp]:
    """A connection with which a test manipulates the store directly."""
    with each_redis.connect() as connection:
        yield connection


async def order(backend: RedisBackend, order: Order) -> None:
    """Change the order of the queue."""
    settings = await backend.control.settings(KEY)
    await backend.control.configure(KEY, settings.model_copy(update={"order": order}))


async def taken(consumer: Any, number: int) -> list[str]:
    """Receive and ack ``number`` deliveries, and return their task ids."""
    deliveries = await take(consumer, number)
    assert set(await consumer.ack(*deliveries)) == {Settled.OK}
    return [delivery.task.id for delivery in deliveries]


async def test_in_flight_when_the_order_goes(
    backend: RedisBackend, each_redis: RedisServer, redis_prefix: str
) -> None:
    """B1, E6, laws 1 and 7: after a change back to FIFO, no task in flight is delivered again, and none is skipped."""
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, "a", "b", "c", tenant="x")
        held = await take(consumer, 2)
        await order(backend, Order.FIFO)
        assert await taken(consumer, 1) == ["c"]
        assert not (await consumer.receive(9, 0)).deliveries
        await order(backend, Order.FIFO)
        await publish(backend, "d", "e", tenant="x")
        assert await taken(consumer, 1) == ["d"]
        assert recounted(each_redis, redis_prefix)[KEY]["in_flight"] == 2
        assert await consumer.redeliver(held[0]) == (Settled.OK,)
        assert await consumer.ack(held[1]) == (Settled.OK,)
        assert await taken(consumer, 2) == ["a", "e"]
        assert recounted(each_redis, redis_prefix)[KEY]["done"] == 5


async def test_there_and_back(
    backend: RedisBackend, each_redis: RedisServer, redis_prefix: str
) -> None:
    """B1, E6, law 4: changing the order repeatedly keeps the position of each waiting and each released task."""
    async with backend.subscribe([KEY], "c") as consumer:
        for n in range(4):
            await publish(backend, *(f"{n}{name}" for name in "abc"), tenant=str(n))
            await consumer.redeliver(*await take(consumer, 1))
            await order(backend, (Order.FIFO, Order.FAIR)[n % 2])
            recounted(each_redis, redis_prefix)
        await order(backend, Order.FIFO)
        ids = await taken(consumer, 12)
        assert [name for name in ids if name not in {"0a", "1a", "2a", "3a"}] == [
            f"{n}{name}" for n in range(4) for name in "bc"
        ]
        assert len(set(ids)) == 12


async def test_what_the_store_has_not_given(
    backend: RedisBackend, raw: Resp, redis_prefix: str
) -> None:
    """Law 7, faults C1 and C4: if a failover undid a delivery, its task is waiting, and the old receipt is refused."""
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, "a", tenant="x")
        (delivery,) = await take(consumer, 1)
        fence = delivery.receipt.partition(".")[0]
        raw.call("XACK", stream(redis_prefix), "g", fence)
        for lane, member in (("y5:x", f"s{fence}"), ("w5", "x"), ("g5", "x")):
            raw.call("ZADD", stream(redis_prefix, lane), fence, member)
        with pytest.raises(LeaseLost):
            await consumer.ack(delivery)
        await backend.control.maintain()
        assert await taken(consumer, 1) == ["a"]


async def test_entries_that_are_gone(backend: RedisBackend, raw: Resp, redis_prefix: str) -> None:
    """E6, fault E7: if a stream entry was deleted, the other tasks are delivered and the anomaly is counted.

    The missing task can be published again.
    """
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, "a", "b", "c", tenant="x")
        ((entry, _),) = raw.call("XRANGE", stream(redis_prefix), "-", "+", "COUNT", "1")
        raw.call("XDEL", stream(redis_prefix), entry)
        assert await taken(consumer, 2) == ["b", "c"]
        assert not (await consumer.receive(1, 0)).deliveries
        assert (await backend.health()).details["anomalies"]
        told = await backend.publisher.publish(Task(key=KEY, id="a", tenant="x"))
        assert [one.status for one in told] == [Published.ACCEPTED]
        assert await taken(consumer, 1) == ["a"]


async def test_groups_that_are_gone(backend: RedisBackend, raw: Resp, redis_prefix: str) -> None:
    """E6, law 1, fault E7: if a consumer group was destroyed, all tasks not yet settled are delivered again."""
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, "a", "b", "c", tenant="x")
        held = await take(consumer, 2)
        raw.call("XGROUP", "DESTROY", stream(redis_prefix), "g")
        await backend.control.maintain()
        assert sorted(await taken(consumer, 3)) == ["a", "b", "c"]
        assert await consumer.ack(*held) == (Settled.OK, Settled.OK)


async def test_what_lay_there_when_a_group_was_lost(
    backend: RedisBackend, raw: Resp, redis_prefix: str
) -> None:
    """E6, law 1, fault E7: no change of the order passes over the deliveries of a lost group."""
    for lane in ("s5", "r5"):
        await order(backend, Order.FAIR)
        async with backend.subscribe([KEY], "dying") as consumer:
            await publish(backend, "a", "b", tenant="x")
            if lane == "r5":
                await consumer.redeliver(*await take(consumer, 2))
            await take(consumer, 2)
            raw.call("XGROUP", "DESTROY", stream(redis_prefix, lane), "g")
            await order(backend, Order.FIFO)
        await backend.control.maintain()
        async with backend.subscribe([KEY], "c") as consumer:
            assert sorted(await taken(consumer, 2)) == ["a", "b"]
        assert await backend.control.purge(KEY) == 0
        settings = await backend.control.settings(KEY)
        ids = {"dedupe_window": 0.0}
        await backend.control.configure(KEY, settings.model_copy(update=ids))


async def test_streams_that_are_gone(backend: RedisBackend, raw: Resp, redis_prefix: str) -> None:
    """E6, fault E7: if a stream was deleted, tasks in other streams and new tasks are still delivered."""
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, "a", tenant="x")
        await consumer.redeliver(*await take(consumer, 1))
        await publish(backend, "b", "c", tenant="x")
        raw.call("DEL", stream(redis_prefix))
        assert await taken(consumer, 1) == ["a"]
        assert not (await consumer.receive(9, 0)).deliveries
        await publish(backend, "d", tenant="x")
        assert await taken(consumer, 1) == ["d"]


async def test_tenants_that_are_gone(backend: RedisBackend, raw: Resp, redis_prefix: str) -> None:
    """E6, fault E7: if the index of tenants was deleted, maintenance finds their waiting tasks."""
    await publish(backend, "a", "b", tenant="x")
    raw.call("DEL", stream(redis_prefix, "w5"), stream(redis_prefix, "g5"))
    for _ in range(2):
        await backend.control.maintain()
    async with backend.subscribe([KEY], "c") as consumer:
        assert await taken(consumer, 2) == ["a", "b"]


async def test_who_holds_a_key_is_gone(backend: RedisBackend, raw: Resp, redis_prefix: str) -> None:
    """R8, E6, fault E7: if the holder of an ordering key was deleted, the next tasks for the key are delivered.

    The deleted task can be published again.
    """
    await publish(backend, "a", "b", "c", tenant="x", ordering_key="e")
    ((entry, _),) = raw.call("XRANGE", stream(redis_prefix), "-", "+", "COUNT", "1")
    raw.call("XDEL", stream(redis_prefix), entry)
    async with backend.subscribe([KEY], "c") as consumer:
        assert not (await consumer.receive(9, 0)).deliveries
        await backend.control.maintain()
        assert await taken(consumer, 1) == ["b"]
        await publish(backend, "a", tenant="x", ordering_key="f")
        assert sorted(await taken(consumer, 2)) == ["a", "c"]


async def test_plain_again(backend: RedisBackend, raw: Resp, redis_prefix: str) -> None:
    """B1, E6: once the tasks left from fair order have ended, new tasks are read from the stream, not from a lane."""
    await publish(backend, "a", "b")
    await order(backend, Order.FIFO)
    async with backend.subscribe([KEY], "c") as consumer:
        assert await taken(consumer, 2) == ["a", "b"]
        await publish(backend, "d")
        assert not raw.call("EXISTS", stream(redis_prefix, "y5:"))
        assert await taken(consumer, 1) == ["d"]


async def test_the_servable_are_found_behind_others(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1, OPEN-F1: a receive sorts the rest of a queue until it finds a tenant below its limit."""
    await order(backend, Order.FIFO)
    await publish(backend, *(f"x{n}" for n in range(2600)), tenant="x")
    await publish(backend, "y", tenant="y")
    settings = await backend.control.settings(KEY)
    limited = settings.model_copy(update={"order": Order.FAIR, "tenant_max_inflight": 1})

    async def cut(*_: object) -> Any:
        raise ConnectionError

    with monkeypatch.context() as patch:
        of = backend.control._of
        patch.setattr(
            backend.control,
            "_of",
            lambda name, *words: (cut if name == "sort" else of)(name, *words),
        )
        with pytest.raises(ConnectionError):
            await backend.control.configure(KEY, limited)
    async with backend.subscribe([KEY], "c") as consumer:
        assert sorted(d.task.id for d in await take(consumer, 2, limit=10)) == ["x0", "y"]


async def test_purge_behind_many_tenants(backend: RedisBackend) -> None:
    """B1, law 4: a purge cancels all waiting tasks, even behind many tenants without any."""
    tasks = [Task(key=KEY, id=f"t{n}", tenant=f"t{n}") for n in range(600)]
    await backend.publisher.publish(*tasks)
    await publish(backend, *(f"z{n}" for n in range(100)), tenant="z")
    async with backend.subscribe([KEY], "c") as consumer:
        await consumer.ack(*await take(consumer, 601))
    assert await backend.control.purge(KEY) == 99


async def test_purge_while_it_is_sorted(
    backend: RedisBackend, each_redis: RedisServer, redis_prefix: str
) -> None:
    """B1, E6: a purge cancels waiting tasks in both plain and sorted lanes, but none in flight."""
    await order(backend, Order.FIFO)
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, *(f"t{n}" for n in range(700)), tenant="x")
        held = await take(consumer, 2)
        await order(backend, Order.FAIR)
        await publish(backend, "late", tenant="y")
        assert await backend.control.purge(KEY) == 699
        assert recounted(each_redis, redis_prefix)[KEY]["in_flight"] == 2
        assert set(await consumer.ack(*held)) == {Settled.OK}
