"""Damaged values in Redis other than whole records: numbers of queues, lists, sets, and the ends of records."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Settled, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.servers import RedisServer
from tests.redis.test_damage import housekept_anyway, name_of

Damage = Callable[[RedisServer, str], object]


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend of the shared server."""
    async with opened(redis_server.url, redis_prefix) as backend:
        yield backend


def _cut(server: RedisServer, name: str) -> object:
    return server.call("SET", f"{name}/n", server.call("GET", f"{name}/n")[:-1])


def _delete(server: RedisServer, name: str) -> object:
    return server.call("DEL", f"{name}/n")


def _spoil(server: RedisServer, name: str) -> object:
    return server.call("SETRANGE", f"{name}/n", 0, struct.pack("<d", math.nan))


@pytest.mark.parametrize("damage", [_cut, _delete, _spoil])
async def test_numbers_of_a_queue(
    backend: RedisBackend, redis_server: RedisServer, damage: Damage
) -> None:
    """U29, law 1: if the numbers of a queue are damaged, they are counted again, and its tasks are delivered."""
    await publish(backend, "a", priority=3)
    await publish(backend, "b")
    damage(redis_server, name_of(backend))
    async with housekept_anyway(backend), backend.subscribe([KEY], "c") as consumer:
        deliveries = await take(consumer, 2)
        assert {delivery.task.id for delivery in deliveries} == {"a", "b"}
        assert set(await consumer.ack(*deliveries)) == {Settled.OK}
    ledger = await backend.control.ledger(KEY)
    assert ledger.balanced
    assert ledger.done == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda server, name: server.call("LPUSH", f"{name}/l", "junk"),
        lambda server, name: (
            server.call("ZADD", f"{name}/m", 1, "junk"),
            server.call("ZADD", f"{name.partition(':q:')[0]}:processing", 1, KEY),
        ),
        lambda server, name: server.call("HSET", f"{name.partition(':q:')[0]}:meta", "swept", "x"),
    ],
    ids=["list of ends", "progress", "time of the last pass"],
)
async def test_junk_does_not_stop_maintenance(
    backend: RedisBackend, redis_server: RedisServer, damage: Damage
) -> None:
    """U29, law 10: maintenance continues with a value that another program has written."""
    await backend.control.configure(KEY, QueueSettings(dedupe_window=0.0))
    await publish(backend, "a")
    async with backend.subscribe([KEY], "c") as consumer:
        await consumer.ack(*await take(consumer, 1))
    damage(redis_server, name_of(backend))
    await backend.control.maintain()
    await backend.control.maintain()
    assert redis_server.call("HLEN", f"{name_of(backend)}/t") == 0


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("deadline", [None, 4e9])
async def test_junk_in_a_lane(
    backend: RedisBackend, redis_server: RedisServer, order: Order, deadline: float | None
) -> None:
    """U29, law 10: members of a lane that another program has written are dropped, and the tasks are delivered."""
    limit = RateLimit(max_tokens=1000) if order is Order.FAIR else None
    settings = QueueSettings(order=order, tenant_rate_limit=limit)
    await backend.control.configure(KEY, settings)
    tasks = [
        Task(key=KEY, id=name, tenant=name, ordering_key=name, deadline=deadline) for name in "ab"
    ]
    await backend.publisher.publish(*tasks)
    name = name_of(backend)
    lanes = redis_server.call("KEYS", f"{name}/y*")
    assert lanes
    for lane in lanes:
        redis_server.call("ZADD", lane, -1, "junk", 0, "s1x", 9e9, "r")
    async with backend.subscribe([KEY], "c") as consumer, housekept_anyway(backend):
        found = await take(consumer, 2)
        assert {delivery.task.id for delivery in found} == {"a", "b"}
        await consumer.ack(*found)
        assert not (await consumer.receive(1, 0)).deliveries
    await backend.control.maintain()
    ledger = await backend.control.ledger(KEY)
    assert (ledger.balanced, ledger.done, ledger.waiting) == (True, 2, 0)


@pytest.mark.parametrize("left", [50, 51, -3])
async def test_an_ack_of_a_record_without_its_end(
    backend: RedisBackend, redis_server: RedisServer, left: int
) -> None:
    """U29: an ack does not fail half-way if the end of the record, with the ordering key, is lost."""
    await backend.publisher.publish(*(Task(key=KEY, id=n, ordering_key="entity") for n in "ab"))
    async with housekept_anyway(backend), backend.subscribe([KEY], "c") as consumer:
        (first,) = await take(consumer, 1)
        record = redis_server.call("HGET", f"{name_of(backend)}/t", "a")
        redis_server.call("HSET", f"{name_of(backend)}/t", "a", record[:left])
        assert await consumer.ack(first) == (Settled.OK,)
        (second,) = await take(consumer, 1)
        assert await consumer.ack(second) == (Settled.OK,)
    assert (await backend.control.ledger(KEY)).balanced


async def test_purge_of_a_task_that_is_elsewhere(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29: a purge ends a task where it found it, even if the record names another place, and so it ends."""
    await publish(backend, "a", "b")
    record = bytearray(redis_server.call("HGET", f"{name_of(backend)}/t", "a"))
    record[24] ^= 1
    redis_server.call("HSET", f"{name_of(backend)}/t", "a", bytes(record))
    assert await backend.control.purge(KEY) == 2
    ledger = await backend.control.ledger(KEY)
    assert ledger.balanced
    assert (ledger.cancelled, ledger.waiting) == (2, 0)


async def test_a_damaged_dead_letter(backend: RedisBackend, redis_server: RedisServer) -> None:
    """U29: one damaged dead letter does not hide the others, and can be redriven."""
    await publish(backend, "a", "b", "c")
    async with backend.subscribe([KEY], "c") as consumer:
        for delivery in await take(consumer, 3):
            await consumer.dead_letter(delivery, "broken")
        for field in "tx":
            stored = redis_server.call("HGET", f"{name_of(backend)}/{field}", "b")
            redis_server.call("HSET", f"{name_of(backend)}/{field}", "b", stored[:5])
        letters = await backend.dead_letters.list(KEY)
        assert [letter.task.id for letter in letters] == ["a", "b", "c"]
        assert await backend.dead_letters.redrive(KEY) == 3
        assert len(await consumer.ack(*await take(consumer, 3))) == 3


async def test_a_deleted_record_survives_a_change_of_order(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29, law 1: a change to fair order builds a deleted record again, and does not drop the task."""
    await publish(backend, "a", "b")
    redis_server.call("HDEL", f"{name_of(backend)}/t", "a")
    await backend.control.configure(KEY, QueueSettings(order=Order.FAIR))
    async with backend.subscribe([KEY], "c") as consumer:
        assert {delivery.task.id for delivery in await take(consumer, 2)} == {"a", "b"}
