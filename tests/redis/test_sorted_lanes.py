"""Sorted lanes: what waits there lies in streams all the same, whose groups stand still meanwhile."""

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
    """A backend whose queue is fair."""
    async with opened(each_redis.url, redis_prefix) as backend:
        await order(backend, Order.FAIR)
        yield backend


@pytest.fixture
def raw(each_redis: RedisServer) -> Iterator[Resp]:
    """A foreign hand."""
    with each_redis.connect() as connection:
        yield connection


async def order(backend: RedisBackend, order: Order) -> None:
    """Change the order of the queue."""
    settings = await backend.control.settings(KEY)
    await backend.control.configure(KEY, settings.model_copy(update={"order": order}))


async def taken(consumer: Any, number: int) -> list[str]:
    """Take and end some."""
    deliveries = await take(consumer, number)
    assert set(await consumer.ack(*deliveries)) == {Settled.OK}
    return [delivery.task.id for delivery in deliveries]


async def test_in_flight_when_the_order_goes(
    backend: RedisBackend, each_redis: RedisServer, redis_prefix: str
) -> None:
    """B1, E6, laws 1 and 7: back in plain lanes nothing in flight is given again, and nothing passed over."""
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
    """B1, E6, law 4: however often the order changes, what waits keeps its place, and what was handed back its own."""
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
    """Law 7, faults C1 and C4: to a store that has gone back a delivery is still waiting, and nobody can end it."""
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
    """E6, fault E7: a foreign hand took an entry: others come, the books say so, and it can be published again."""
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
    """E6, law 1, fault E7: a foreign hand took a group, and with it who holds what: what has not ended comes again."""
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, "a", "b", "c", tenant="x")
        held = await take(consumer, 2)
        raw.call("XGROUP", "DESTROY", stream(redis_prefix), "g")
        await backend.control.maintain()
        assert sorted(await taken(consumer, 3)) == ["a", "b", "c"]
        assert await consumer.ack(*held) == (Settled.OK, Settled.OK)


async def test_purge_while_it_is_sorted(
    backend: RedisBackend, each_redis: RedisServer, redis_prefix: str
) -> None:
    """B1, E6: a purge ends what waits in plain lanes as in sorted ones, and nothing that is in flight."""
    await order(backend, Order.FIFO)
    async with backend.subscribe([KEY], "c") as consumer:
        await publish(backend, *(f"t{n}" for n in range(700)), tenant="x")
        held = await take(consumer, 2)
        await order(backend, Order.FAIR)
        await publish(backend, "late", tenant="y")
        assert await backend.control.purge(KEY) == 699
        assert recounted(each_redis, redis_prefix)[KEY]["in_flight"] == 2
        assert set(await consumer.ack(*held)) == {Settled.OK}
