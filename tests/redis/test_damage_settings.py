"""Damaged settings, weights and subscriptions in Redis: nothing stops, and the settings are applied again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import QueueInUse
from taskqueue_core.tasks import Published, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.servers import RedisServer
from tests.redis.test_damage import name_of


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend of the shared server."""
    async with opened(redis_server.url, redis_prefix) as backend:
        yield backend


each_junk = pytest.mark.parametrize("junk", [b"", b"junk", b"[]", b"\xff\xfe", b'{"paused": 3}'])


@each_junk
@pytest.mark.parametrize("fields", [("settings",), ("settings", "copied")])
async def test_settings_are_damaged(
    backend: RedisBackend, redis_server: RedisServer, junk: bytes, fields: tuple[str, ...]
) -> None:
    """U29, law 9: damaged settings are restored from their copy; without it, the limits hold and can be set again."""
    await publish(backend, "a", key="other")
    settings = await backend.control.configure(KEY, QueueSettings(paused=True, queue_ttl=60.0))
    await publish(backend, "t")
    name = name_of(backend)
    for field in fields:
        redis_server.call("HSET", name, field, junk + field.encode())
    lost = len(fields) == 2
    redis_server.call("ZADD", f"{name.partition(':q:')[0]}:idle", 0, KEY)
    expected = QueueSettings(version=1) if lost else settings
    assert await backend.control.settings(KEY) == expected
    await backend.control.maintain()
    await backend.control.stats(KEY)
    assert (await backend.health()).details["anomalies"]
    async with backend.subscribe([KEY, "other"], "c") as consumer:
        (delivery,) = await take(consumer, 1)
        assert delivery.task.id == "a"
        assert not (await consumer.receive(1, 0)).deliveries
        found = await backend.control.settings(KEY)
        assert found.version == (1 if lost else 2)
        await backend.control.configure(KEY, found.model_copy(update={"paused": False}))
        (delivery,) = await take(consumer, 1)
        assert delivery.task.id == "t"


async def test_a_report_of_damage_never_fails(
    backend: RedisBackend, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U29: maintenance continues if the settings of a damaged queue cannot be applied again."""
    await publish(backend, "t")

    async def fail(*_: object) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(backend.control, "configure", fail)
    redis_server.call("RPUSH", f"{name_of(backend).partition(':q:')[0]}:damaged", f"{KEY} /")
    await backend.control.maintain()


@pytest.mark.parametrize("junk", ["", "junk", "[]", "{}", "[1, 2]", '{"a": 1}'])
async def test_bound_queues_are_damaged(
    backend: RedisBackend, redis_server: RedisServer, junk: str
) -> None:
    """U29, law 1: a task is refused, not lost, while the queues to which its queue is bound are damaged."""
    await backend.control.configure(KEY, QueueSettings(bound_to=("copy",)))
    redis_server.call("HSET", name_of(backend), "bound_to", junk)
    tasks = Task.of(KEY, "t", id="t"), Task.of("other", "o", id="o")
    refused, accepted = await backend.publisher.publish(*tasks)
    assert (refused.status, accepted.status) == (Published.REFUSED, Published.ACCEPTED)
    await backend.control.maintain()
    (accepted,) = await backend.publisher.publish(tasks[0])
    assert accepted.status is Published.ACCEPTED
    async with backend.subscribe(["copy"], "c") as consumer:
        await take(consumer, 1)


async def test_the_new_name_of_a_queue_is_lost(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29: a queue that has moved refuses tasks if it is not known to which queue; other queues accept theirs."""
    await backend.control.configure(KEY, QueueSettings(moved_to="new"))
    redis_server.call("HDEL", name_of(backend), "moved_to")
    tasks = Task.of(KEY, "t", id="t"), Task.of("other", "o", id="o")
    refused, accepted = await backend.publisher.publish(*tasks)
    assert (refused.status, accepted.status) == (Published.REFUSED, Published.ACCEPTED)


@pytest.mark.parametrize("counter", ["scheduled", "expired", "retried", "version"])
async def test_a_counter_is_damaged(
    backend: RedisBackend, redis_server: RedisServer, counter: str
) -> None:
    """U29: a counter that is no number stops neither reports nor a change of the settings."""
    await publish(backend, "t")
    await backend.control.configure(KEY, QueueSettings())
    redis_server.call("HSET", name_of(backend), counter, "junk")
    stats = await backend.control.stats(KEY)
    assert stats.ledger.balanced
    await backend.control.configure(KEY, await backend.control.settings(KEY))
    assert (await backend.control.settings(KEY)).version == 2


@pytest.mark.parametrize("weight", ["0", "-1", "junk", "nan", "inf", "-inf", "1e-300", "1e300", ""])
async def test_a_weight_is_damaged(
    backend: RedisBackend, redis_server: RedisServer, weight: str
) -> None:
    """U29: a tenant whose weight is no positive number has the weight 1, and takes turns with the others."""
    await backend.control.configure(KEY, QueueSettings(order=Order.FAIR, weights={"x": 2, "y": 1}))
    redis_server.call("HSET", f"{name_of(backend)}/W", "x", weight)
    tasks = [Task.of(KEY, n, id=f"{who}{n}", tenant=who) for n in range(20) for who in ("x", "y")]
    await backend.publisher.publish(*tasks)
    async with backend.subscribe([KEY], "c") as consumer:
        for _ in range(4):
            deliveries = await take(consumer, 10)
            assert sum(delivery.task.tenant == "x" for delivery in deliveries) == 5
            await consumer.ack(*deliveries)


async def test_the_queues_of_a_consumer_are_deleted(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29: a subscription whose key was deleted does not count as a use of its queue for ever."""
    partition = name_of(backend).partition(":q:")[0]
    await publish(backend, "t")
    async with backend.subscribe([KEY], "c") as consumer:
        await consumer.ack(*await take(consumer, 1))
        with pytest.raises(QueueInUse):
            await backend.control.delete(KEY)
        redis_server.call("DEL", f"{partition}:k:{consumer.token}")
    assert redis_server.call("HGET", f"{partition}:subs", KEY) == b"1"
    assert (await backend.control.delete(KEY)).deleted
    assert not redis_server.call("EXISTS", f"{partition}:subs")


async def test_the_paused_tenants_are_deleted(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29: if the key with the paused tenants is lost, a check applies the settings again, and they wait again."""
    settings = QueueSettings(order=Order.FAIR, paused_tenants=("x",))
    await backend.control.configure(KEY, settings)
    await backend.publisher.publish(Task.of(KEY, 1, tenant="x"))
    redis_server.call("DEL", f"{name_of(backend)}/W")
    await backend.control.maintain()
    assert redis_server.call("HGETALL", f"{name_of(backend)}/W") == [b"x", b"-1"]
    async with backend.subscribe([KEY], "c") as consumer:
        assert (await consumer.receive(1, 0)).deliveries == ()
        found = await backend.control.settings(KEY)
        await backend.control.configure(KEY, found.model_copy(update={"paused_tenants": ()}))
        assert len(await take(consumer, 1)) == 1
