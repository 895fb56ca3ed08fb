"""Damaged data in Redis: a task with a damaged record is recovered or counted, and everything else continues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import BackendUnavailable, LeaseLost, PublishUnconfirmed
from taskqueue_core.tasks import Delivery, Published, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, LEASE, PATIENCE, housekept, opened, publish, take, until
from tests.redis.servers import RedisServer

Damage = Callable[[RedisServer, str, str], None]


def cut(server: RedisServer, name: str, task_id: str) -> None:
    """Cut the record of a task, as a file that is not complete can."""
    record = server.call("HGET", f"{name}/t", task_id)
    server.call("HSET", f"{name}/t", task_id, record[:20])


def spoil(server: RedisServer, name: str, task_id: str) -> None:
    """Overwrite the record of a task with other bytes."""
    record = server.call("HGET", f"{name}/t", task_id)
    server.call("HSET", f"{name}/t", task_id, b"\xff" * len(record))


def remove(server: RedisServer, name: str, task_id: str) -> None:
    """Delete the record of a task."""
    server.call("HDEL", f"{name}/t", task_id)


each_damage = pytest.mark.parametrize("damage", [cut, spoil, remove])


def name_of(backend: RedisBackend, key: str = KEY) -> str:
    """Return the name under which the store keeps a queue."""
    return f"{backend._context.scripts.partitions.of(key)}:q:{key}"


async def waiting(backend: RedisBackend) -> None:
    """Leave a task waiting that was never delivered."""
    await publish(backend, "t")


async def returned(backend: RedisBackend) -> None:
    """Leave a task waiting that was released."""
    await publish(backend, "t")
    async with backend.subscribe([KEY], "before") as consumer:
        await consumer.redeliver(*(await take(consumer, 1)))


async def scheduled(backend: RedisBackend) -> None:
    """Leave a task that is due in a moment."""
    await backend.publisher.publish(Task.of(KEY, "t", id="t", not_before=backend.now() + 0.3))


async def retried(backend: RedisBackend) -> None:
    """Leave a task whose second attempt is due in a moment."""
    await publish(backend, "t")
    async with backend.subscribe([KEY], "before") as consumer:
        (delivery,) = await take(consumer, 1)
        await backend.publisher.schedule_retry(delivery.task, backend.now() + 0.3, settles=delivery)


async def overdue(backend: RedisBackend) -> None:
    """Leave a task whose deadline comes in a moment, with a task behind it that has none."""
    await backend.publisher.publish(Task.of(KEY, "t", id="t", deadline=backend.now() + 0.1))
    await asyncio.sleep(0.2)


async def held(backend: RedisBackend) -> None:
    """Leave a task that waits for its ordering key."""
    tasks = [Task.of(KEY, n, id=n, ordering_key="e") for n in ("first", "t")]
    await backend.publisher.publish(*tasks)


async def dead(backend: RedisBackend) -> None:
    """Leave a dead letter."""
    await publish(backend, "t")
    async with backend.subscribe([KEY], "before") as consumer:
        (delivery,) = await take(consumer, 1)
        await consumer.dead_letter(delivery, "broken")


async def done(backend: RedisBackend) -> None:
    """Leave the record of an executed task, which is deleted after a second."""
    await backend.control.configure(KEY, QueueSettings(dedupe_window=1.0))
    await publish(backend, "t")
    async with backend.subscribe([KEY], "before") as consumer:
        await consumer.ack(*(await take(consumer, 1)))


@each_damage
@pytest.mark.parametrize(
    "state", [waiting, returned, scheduled, retried, overdue, held, dead, done]
)
async def test_a_record_is_damaged(
    state: Callable[[RedisBackend], Awaitable[None]],
    damage: Damage,
    redis_server: RedisServer,
    redis_prefix: str,
) -> None:
    """U29: whatever the state of a task with a damaged record, other tasks and maintenance continue.

    A task that waits is executed exactly once.
    """
    async with opened(redis_server.url, redis_prefix) as backend, housekept(backend):
        await state(backend)
        damage(redis_server, name_of(backend), "t")
        for call in (backend.control.cancel(KEY, "unknown"), backend.control.stats(KEY)):
            await call
        await backend.control.statuses(KEY, "t")
        if damage is not remove:
            (confirmation,) = await backend.publisher.publish(Task.of(KEY, "t", id="t"))
            assert confirmation.status is Published.DUPLICATE
        await publish(backend, "other")
        executed: list[str] = []
        async with asyncio.timeout(PATIENCE), backend.subscribe([KEY], "c") as consumer:
            expected = {"other", "first"} if state is held else {"other"}
            if state not in (dead, done, overdue):
                expected.add("t")
            while not expected <= set(executed):
                for delivery in (await consumer.receive(10, 1.0)).deliveries:
                    executed.append(delivery.task.id)
                    if state is retried and delivery.task.id == "t":
                        assert delivery.attempt == 2
                    await consumer.ack(delivery)
            if state is dead:
                await backend.dead_letters.redrive(KEY)
                await until(lambda: _is_empty(backend), "the queue has no dead letter")
        assert len(executed) == len(set(executed))
        if state is not done:
            assert (await backend.health()).details["anomalies"]


async def _is_empty(backend: RedisBackend) -> bool:
    return not await backend.dead_letters.list(KEY)


@each_damage
@pytest.mark.parametrize("state", [waiting, returned, scheduled, retried, held])
async def test_a_purge_with_a_damaged_record(
    state: Callable[[RedisBackend], Awaitable[None]],
    damage: Damage,
    redis_server: RedisServer,
    redis_prefix: str,
) -> None:
    """U29: a purge ends a task with a damaged record like any other, and the ledger balances."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await state(backend)
        await publish(backend, "other")
        damage(redis_server, name_of(backend), "t")
        await backend.control.purge(KEY)
        ledger = await backend.control.ledger(KEY)
        assert ledger.balanced
        assert (ledger.waiting, ledger.scheduled, ledger.in_flight) == (0, 0, 0)


async def settle(verb: str, backend: RedisBackend, consumer: Any, delivery: Delivery) -> None:
    """Settle a delivery in one of the ways; ``progress`` is followed by an ack."""
    match verb:
        case "ack":
            await consumer.ack(delivery)
        case "redeliver" | "lost":
            await consumer.redeliver(delivery, lost=verb == "lost")
        case "retry":
            await backend.publisher.schedule_retry(delivery.task, backend.now(), settles=delivery)
        case "dead_letter":
            await consumer.dead_letter(delivery, "broken")
        case _:
            assert await backend.control.progress(delivery, 0.5)
            await consumer.ack(delivery)


@each_damage
@pytest.mark.parametrize("verb", ["ack", "redeliver", "retry", "dead_letter", "progress", "lost"])
async def test_a_record_is_damaged_in_flight(
    verb: str, damage: Damage, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29: a delivery whose record is damaged can be settled like any other, and loses no attempt."""
    async with opened(redis_server.url, redis_prefix) as backend, housekept(backend):
        await publish(backend, "t")
        async with backend.subscribe([KEY], "c") as consumer, asyncio.timeout(PATIENCE):
            (delivery,) = await take(consumer, 1)
            damage(redis_server, name_of(backend), "t")
            if verb != "lost":
                await settle(verb, backend, consumer, delivery)
            else:
                await backend._context.heartbeat.aclose()
                async with opened(redis_server.url, redis_prefix) as other:
                    heir = other.subscribe([KEY], "heir")
                    (again,) = (await heir.receive(1, None)).deliveries
                    assert again.losses == 1
                    await heir.ack(again)
            if verb in {"redeliver", "retry"}:
                (again,) = (await consumer.receive(1, None)).deliveries
                assert again.attempt == (2 if verb == "retry" else 1)
                await consumer.ack(again)
            ledger = await backend.control.ledger(KEY)
            assert ledger.balanced
            assert (ledger.done, ledger.dead) == ((0, 1) if verb == "dead_letter" else (1, 0))
    assert LEASE < PATIENCE


_KINDS = {
    **dict.fromkeys(["t", "b", "x", "p", "o", "a", "T", "W", "h"], "hash"),
    **dict.fromkeys(["e", "k", "d", "dead", "m", "u", "v", "J", "z5", "w5", "g5"], "zset"),
    **dict.fromkeys(["n", "f"], "string"),
    "l": "list",
    "s5": "stream",
    "r5": "stream",
}
_SHARED = [
    "due",
    "deadlines",
    "processing",
    "results",
    "forget",
    "alive",
    "queues",
    "ready",
    "subs",
]


@pytest.mark.parametrize("key", [*(f"/{name}" for name in _KINDS), "", *_SHARED])
async def test_a_key_has_a_wrong_type(
    key: str, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29: a key of a wrong type is put aside, not deleted; calls work again, and other queues continue."""
    async with opened(redis_server.url, redis_prefix) as backend:
        settings = QueueSettings(max_inflight=50, result_ttl=60.0)
        await backend.control.configure(KEY, settings)
        await publish(backend, "a", "b")
        await backend.publisher.publish(Task.of("other", "o", id="o"))
        partition = backend._context.scripts.partitions.names[0]
        name = f"{partition}:{key}" if key in _SHARED else f"{name_of(backend)}{key}"
        redis_server.call("DEL", name)
        wrong = ("SET", name, "x") if _KINDS.get(key[1:]) != "string" else ("SADD", name, "x")
        redis_server.call(*wrong)
        async with (
            asyncio.timeout(PATIENCE),
            housekept_anyway(backend),
            backend.subscribe([KEY, "other"], "c") as consumer,
        ):
            executed: set[str] = set()
            while not {"new", "other"} <= executed:
                for task in (Task.of(KEY, "new", id="new"), Task.of("other", "other", id="other")):
                    with contextlib.suppress(BackendUnavailable, PublishUnconfirmed):
                        await backend.publisher.publish(task)
                with contextlib.suppress(BackendUnavailable):
                    for delivery in (await consumer.receive(10, 0.1)).deliveries:
                        await settled(consumer, delivery)
                        executed.add(delivery.task.id)
            limit = None if key == "" else 50
            await until(lambda: _limited(backend, limit), "the settings apply")
            assert (await backend.control.ledger("other")).balanced
        aside = name.replace(f"{partition}:", f"{partition}:aside:", 1)
        assert any(redis_server.call("EXISTS", kept) for kept in (aside, name))


@asynccontextmanager
async def housekept_anyway(backend: RedisBackend) -> AsyncIterator[None]:
    """Run maintenance passes in the background, even if some fail."""

    async def passes() -> None:
        while True:
            with contextlib.suppress(BackendUnavailable):
                await backend.control.maintain()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(passes())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("key", ["n", "f", "x", "T"])
async def test_packed_numbers_are_cut(
    key: str, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29: the numbers, limits, history or tenants of a queue are cut: calls work again, with the same limits."""
    async with opened(redis_server.url, redis_prefix) as backend:
        settings = QueueSettings(order=Order.FAIR, tenant_max_inflight=50, max_inflight=40)
        await backend.control.configure(KEY, settings)
        tasks = [Task.of(KEY, n, id=n, tenant="x") for n in ("a", "b")]
        await backend.publisher.publish(*tasks)
        async with backend.subscribe([KEY], "c") as consumer, asyncio.timeout(PATIENCE):
            (first,) = await take(consumer, 1)
            await backend.publisher.schedule_retry(first.task, 0.0, settles=first, error="e")
            name = f"{name_of(backend)}/{key}"
            if key in "nf":
                redis_server.call("SET", name, redis_server.call("GET", name)[:30])
            else:
                for field in redis_server.call("HKEYS", name):
                    value = redis_server.call("HGET", name, field)
                    redis_server.call("HSET", name, field, value[: len(value) // 2])
            executed: set[str] = set()
            async with housekept_anyway(backend):
                while not {"a", "b", "c"} <= executed:
                    with contextlib.suppress(BackendUnavailable, PublishUnconfirmed):
                        await backend.publisher.publish(Task.of(KEY, "c", id="c"))
                    with contextlib.suppress(BackendUnavailable):
                        for delivery in (await consumer.receive(10, 0.1)).deliveries:
                            await settled(consumer, delivery)
                            executed.add(delivery.task.id)
                await until(lambda: _limited(backend, 40), "the settings apply")
            assert (await backend.control.ledger(KEY)).balanced


async def settled(consumer: Subscription, delivery: Delivery) -> None:
    """Ack a delivery. Repeat the call while it fails, as every consumer does."""
    with contextlib.suppress(LeaseLost):
        while True:
            try:
                await consumer.ack(delivery)
            except BackendUnavailable:
                continue
            return


async def _limited(backend: RedisBackend, expected: int | None) -> bool:
    with contextlib.suppress(BackendUnavailable):
        return (await backend.control.settings(KEY)).max_inflight == expected
    return False
