"""Indexes of a queue in Redis that have lost members or have others: maintenance puts back and removes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, PATIENCE, housekept, opened, publish, take, until
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer
from tests.redis.test_damage import name_of


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend of the shared server."""
    async with opened(redis_server.url, redis_prefix) as backend:
        yield backend


async def _fill(backend: RedisBackend, order: Order) -> set[str]:
    """Leave tasks that are scheduled, retried, returned, waiting or held, and a dead letter; return the live ones."""
    later = backend.now() + 1.0
    await backend.control.configure(KEY, QueueSettings(order=order))
    async with backend.subscribe([KEY], "before") as consumer:
        await publish(backend, "retried", "dead", "returned")
        retried, dead, returned = await take(consumer, 3)
        await backend.publisher.schedule_retry(retried.task, backend.now(), settles=retried)
        await consumer.dead_letter(dead, "broken")
        await consumer.redeliver(returned)
    if order is Order.FAIR:
        await backend.publisher.publish(
            *(Task.of(KEY, n, id=n, ordering_key="e", tenant="x") for n in ("first", "held")),
            Task.of(KEY, "y", id="y", tenant="y"),
        )
    await publish(backend, "scheduled", not_before=later)
    live = {"retried", "returned", "scheduled"}
    return live | {"first", "held", "y"} if order is Order.FAIR else live


async def _counted(backend: RedisBackend, done: int) -> None:
    async def counted() -> bool:
        ledger = await backend.control.ledger(KEY)
        return ledger.balanced and (ledger.done, ledger.dead, ledger.scheduled) == (done, 1, 0)

    await until(counted, "the ledger balances")


async def _executed(backend: RedisBackend, live: set[str]) -> list[str]:
    """Receive and ack tasks during maintenance until all live ones are done and the ledger balances; return the ids."""
    executed: list[str] = []
    async with (
        housekept(backend),
        backend.subscribe([KEY], "c") as consumer,
        asyncio.timeout(PATIENCE),
    ):
        while not live <= set(executed):
            for delivery in (await consumer.receive(10, 0.2)).deliveries:
                executed.append(delivery.task.id)
                await consumer.ack(delivery)
        await _counted(backend, len(live))
    return executed


@pytest.mark.parametrize(
    ("order", "index"),
    [
        *((Order.FIFO, index) for index in ("d", "dead", "z5")),
        *((Order.FAIR, index) for index in ("d", "J", "j:e", "h", "w5", "g5", "y5:*")),
    ],
)
async def test_an_index_has_lost_its_members(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, order: Order, index: str
) -> None:
    """U29, A2: tasks that an index has lost are found by their records, and delivered or listed like any other."""
    live = await _fill(backend, order)
    for key in redis_server.call("KEYS", f"{name_of(backend)}/{index}"):
        redis_server.call("DEL", key)
    executed = await _executed(backend, live)
    (letter,) = await backend.dead_letters.list(KEY)
    assert letter.task.id == "dead"
    assert sorted(executed) == sorted(live)
    if "held" in live:
        assert executed.index("first") < executed.index("held")
    recounted(redis_server, redis_prefix)
    assert (await backend.health()).details["anomalies"]


async def test_a_rescheduled_task_keeps_its_time(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29, U6: a scheduled task that the index has lost gets the time of its last reschedule, also as a retry."""
    now = backend.now()
    await publish(backend, "again", "moved", not_before=now + 3600)
    await publish(backend, "failed")
    async with backend.subscribe([KEY], "c") as consumer:
        (failed,) = await take(consumer, 1)
        await backend.publisher.schedule_retry(failed.task, now + 60, settles=failed)
    times = {"moved": now + 7200, "again": now + 1800, "failed": now + 5400}
    assert await backend.control.reschedule(KEY, "again", now + 7200)
    for task, at in times.items():
        assert await backend.control.reschedule(KEY, task, at)
    redis_server.call("DEL", f"{name_of(backend)}/d")
    redis_server.call("HDEL", f"{name_of(backend).partition(':q:')[0]}:meta", "checked")
    await backend.control.maintain()
    for task, at in times.items():
        (status,) = await backend.control.statuses(KEY, task)
        assert status is not None
        assert status.due_at == pytest.approx(at, abs=1e-5)


async def test_a_holder_was_changed(backend: RedisBackend, redis_server: RedisServer) -> None:
    """U29: an ordering key that names another task as its holder is held by the right one again."""
    live = await _fill(backend, Order.FAIR)
    redis_server.call("HSET", f"{name_of(backend)}/h", "e", "held")
    executed = await _executed(backend, live)
    assert executed.index("first") < executed.index("held")


async def test_the_list_of_ends_is_lost(redis_server: RedisServer, redis_prefix: str) -> None:
    """U29: records of ended tasks are deleted after their time, even if the list of ends has lost them."""
    clock = ManualClock(start=1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        await publish(backend, "t")
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(*await take(consumer, 1))
        redis_server.call("DEL", f"{name_of(backend)}/l")
        await clock.advance(QueueSettings().dedupe_window + 599)
        await backend.control.maintain()
        assert redis_server.call("EXISTS", f"{name_of(backend)}/t")
        await clock.advance(2)
        redis_server.call("HDEL", f"{name_of(backend).partition(':q:')[0]}:meta", "checked")
        await backend.control.maintain()
        assert not redis_server.call("EXISTS", f"{name_of(backend)}/t")


@pytest.mark.parametrize("index", ["d", "dead", "J"])
async def test_junk_in_an_index(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, index: str
) -> None:
    """U29, law 1: members without a task are removed from an index, and the ledger balances."""
    live = await _fill(backend, Order.FAIR)
    junk = ("9e15", "junk", "9e15", f"{1:017d}junk", "1", "retried", "9e15", f"{1:017d}scheduled")
    redis_server.call("ZADD", f"{name_of(backend)}/{index}", *junk)
    executed = await _executed(backend, live)
    assert sorted(executed) == sorted(live)
    recounted(redis_server, redis_prefix)


async def test_many_tasks_that_are_lost_from_an_index(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U29, A9: a pass checks some records, and more of them while it finds damage, until all are back."""
    await publish(backend, *(f"t{n}" for n in range(3000)), not_before=backend.now() + 3600)
    redis_server.call("DEL", f"{name_of(backend)}/d")
    counts: list[int] = []
    async with asyncio.timeout(PATIENCE):
        while (await backend.control.ledger(KEY)).scheduled < 3000 or not counts:
            redis_server.call("HDEL", f"{name_of(backend).partition(':q:')[0]}:meta", "checked")
            await backend.control.maintain()
            counts.append(redis_server.call("ZCARD", f"{name_of(backend)}/d"))
    steps = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert max(steps) <= 1000
    assert len(steps) <= 20
    assert (await backend.control.ledger(KEY)).balanced


@pytest.mark.parametrize("damage", ["DEL", "SET"])
async def test_the_index_of_tags_is_lost(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, damage: str
) -> None:
    """U18, U29: an index of tags that is gone or has a wrong type is built again from what is stored of each task.

    It has the ended tasks, too, and no tag that it did not have before.
    """
    await backend.control.configure(KEY, QueueSettings(index=("user",), keep_ended=3600))
    names = [f"t{n:03}" for n in range(300)]
    await publish(backend, *names, tags=("user:1", "order:1"))
    async with backend.subscribe([KEY], "c") as consumer:
        await consumer.ack(*await take(consumer, 100))
    await backend.control.configure(
        KEY, QueueSettings(version=1, index=("user", "order"), keep_ended=3600)
    )
    index = f"{name_of(backend)}/i"
    redis_server.call("DEL", index)
    if damage == "SET":
        redis_server.call("SET", index, "x")
    for _ in range(9):
        redis_server.call("HDEL", f"{name_of(backend).partition(':q:')[0]}:meta", "checked")
        await backend.control.maintain()
    page = await backend.listing.tasks(KEY, tag="user:1", limit=1000)
    assert [task.task_id for task in page.tasks] == names
    assert not (await backend.listing.tasks(KEY, tag="order:1")).tasks
    recounted(redis_server, redis_prefix)
    assert (await backend.health()).details["anomalies"]
