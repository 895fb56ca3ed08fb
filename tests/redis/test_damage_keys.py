"""Damaged keys of queues, limits, settings and the partition: found by the script that reads them, and rebuilt."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import BackendUnavailable, QueueInUse
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Published, Task
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


@pytest.mark.parametrize("lanes", [b"\x00", b"x", b"3"])
async def test_lanes_that_hide_tasks(
    backend: RedisBackend, redis_server: RedisServer, lanes: bytes
) -> None:
    """U29, laws 1, 6: wrong priorities in the numbers of a queue hide no task; they are found and delivered."""
    await publish(backend, "a", "b")
    numbers = redis_server.call("GET", f"{name_of(backend)}/n")
    redis_server.call("SET", f"{name_of(backend)}/n", numbers[:-1] + lanes)
    async with housekept_anyway(backend), backend.subscribe([KEY], "c") as consumer:
        deliveries = await take(consumer, 2)
        assert {delivery.task.id for delivery in deliveries} == {"a", "b"}
        await consumer.ack(*deliveries)
    assert (await backend.control.ledger(KEY)).balanced


async def test_a_queue_with_hidden_tasks_is_not_deleted(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29, law 1: a queue is deleted only if no priority has tasks, whatever its numbers say."""
    await publish(backend, "a", "b")
    numbers = redis_server.call("GET", f"{name_of(backend)}/n")
    redis_server.call("SET", f"{name_of(backend)}/n", bytes(64) + numbers[64:-1] + b"3")
    with pytest.raises(QueueInUse):
        await backend.control.delete(KEY)
    async with backend.subscribe([KEY], "c") as consumer:
        assert len(await take(consumer, 2)) == 2


def cut_limits(server: RedisServer, name: str) -> object:
    """Cut the limits of a queue."""
    return server.call("SET", f"{name}/f", server.call("GET", f"{name}/f")[:30])


each_damage_of_limits = pytest.mark.parametrize(
    "damage",
    [
        cut_limits,
        lambda server, name: server.call("SET", f"{name}/f", b"\xff" * 200),
        lambda server, name: server.call("SET", f"{name}/f", bytes(192)),
        lambda server, name: server.call("DEL", f"{name}/f"),
        lambda server, name: (
            cut_limits(server, name),
            server.call("SET", f"{name}/n", server.call("GET", f"{name}/n")[:-1]),
        ),
    ],
    ids=["cut", "not numbers", "zeros", "missing", "numbers too"],
)


@each_damage_of_limits
async def test_damaged_limits_of_a_paused_queue(
    backend: RedisBackend, redis_server: RedisServer, damage: Damage
) -> None:
    """U29, laws 5, 9: a paused queue with damaged limits delivers nothing, also before the next maintenance."""
    await backend.control.configure(KEY, QueueSettings(paused=True))
    await publish(backend, "a", "b")
    damage(redis_server, name_of(backend))
    async with backend.subscribe([KEY], "c") as consumer:
        # Damaged numbers fail a call, and are repaired.
        with contextlib.suppress(BackendUnavailable):
            await consumer.receive(10, 0)
        assert not (await consumer.receive(10, 0)).deliveries
        assert (await backend.health()).details["anomalies"] not in {0, None}
        await backend.control.maintain()
        assert not (await consumer.receive(10, 0)).deliveries
        settings = await backend.control.settings(KEY)
        await backend.control.configure(KEY, settings.model_copy(update={"paused": False}))
        assert len(await take(consumer, 2)) == 2


@each_damage_of_limits
async def test_damaged_limits_of_a_full_queue(
    backend: RedisBackend, redis_server: RedisServer, damage: Damage
) -> None:
    """U29, laws 5, 6: the capacity, the limit in flight and the rate hold although their stored limits are damaged."""
    await backend.control.configure(
        KEY, QueueSettings(capacity=3, max_inflight=1, rate_limit=RateLimit(max_tokens=2, interval=3600))
    )  # fmt: skip
    await publish(backend, "a", "b")
    damage(redis_server, name_of(backend))
    tasks = [Task(key=KEY, id=f"t{n}") for n in range(5)]
    with contextlib.suppress(BackendUnavailable):
        await backend.publisher.publish(tasks[0])
    answers = await backend.publisher.publish(*tasks)
    assert [answer.status is Published.REFUSED for answer in answers] == [False] + 4 * [True]
    async with backend.subscribe([KEY], "c") as consumer:
        await backend.control.maintain()
        received = await consumer.receive(10, 0)
    assert not received.deliveries, "the rate limit begins without tokens"


@each_damage_of_limits
async def test_damaged_limits_of_tenants(
    backend: RedisBackend, redis_server: RedisServer, damage: Damage
) -> None:
    """U29, law 5: the limit in flight of each tenant counts what is in flight, although the limits were damaged."""
    await backend.control.configure(KEY, QueueSettings(order=Order.FAIR, tenant_max_inflight=2))
    await publish(backend, *"abcd", tenant="x")
    async with backend.subscribe([KEY], "c") as consumer:
        running = await take(consumer, 2)
        damage(redis_server, name_of(backend))
        with contextlib.suppress(BackendUnavailable):
            await consumer.receive(10, 0)
        assert not (await consumer.receive(10, 0)).deliveries
        await consumer.ack(*running)
        assert len(await take(consumer, 2)) == 2
