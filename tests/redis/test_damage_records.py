"""Records in Redis that are damaged or contradict the entry of their task, and entries of other programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import State, Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.task_listing import TaskLister
from tests.redis.backends import KEY, PATIENCE, housekept, opened, publish, take, until
from tests.redis.links import settings_for
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer
from tests.redis.test_damage import cut, dead, held, name_of, remove, returned, scheduled, settle

Changed = Callable[[bytearray], object]


def _flip(place: int, bit: int = 1) -> Changed:
    def change(record: bytearray) -> None:
        record[place] ^= bit

    return change


def change(server: RedisServer, backend: RedisBackend, how: Changed, task_id: str = "t") -> None:
    """Change bytes of the record of a task."""
    name = f"{name_of(backend)}/t"
    record = bytearray(server.call("HGET", name, task_id))
    how(record)
    server.call("HSET", name, task_id, bytes(record))


def _all_ones(record: bytearray) -> None:
    record[:] = b"\x01" * len(record)


_CHANGES = {
    "fence": _flip(24),
    "place": _flip(1, 2),
    "priority": _flip(2),
    "everything": _all_ones,
}
each_change = pytest.mark.parametrize("how", _CHANGES.values(), ids=_CHANGES)


async def test_a_record_contradicts_the_entry(redis_server: RedisServer, redis_prefix: str) -> None:
    """U29: a released task is executed once, even if its record says that it was executed."""
    async with opened(redis_server.url, redis_prefix) as backend, housekept(backend):
        await returned(backend)
        name = f"{name_of(backend)}/t"
        record = redis_server.call("HGET", name, "t")
        redis_server.call("HSET", name, "t", b"\x03\x00" + record[2:])
        async with backend.subscribe([KEY], "c") as consumer, asyncio.timeout(PATIENCE):
            await consumer.ack(*(await take(consumer, 1)))
        ledger = await backend.control.ledger(KEY)
        assert ledger.balanced
        assert ledger.done == 1


@each_change
@pytest.mark.parametrize("order", [Order.FIFO, Order.FAIR])
@pytest.mark.parametrize("verb", ["ack", "redeliver", "retry", "dead_letter", "progress", "lost"])
async def test_a_changed_record_in_flight(
    verb: str, order: Order, how: Changed, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29, law 1: a record that no longer names the task's entry is rebuilt when the delivery is settled."""
    async with opened(redis_server.url, redis_prefix) as backend, asyncio.timeout(PATIENCE):
        await backend.control.configure(KEY, QueueSettings(order=order))
        await publish(backend, "t")
        async with backend.subscribe([KEY], "c") as consumer:
            (delivery,) = await take(consumer, 1)
            change(redis_server, backend, how)
            await settle(verb, backend, consumer, delivery)
            if verb in {"redeliver", "retry", "lost"}:
                (again,) = await take(consumer, 1)
                assert (again.attempt, again.losses) == (1 + (verb == "retry"), verb == "lost")
                await consumer.ack(again)
        ledger = await backend.control.ledger(KEY)
        assert ledger.balanced
        assert (ledger.done, ledger.dead) == ((0, 1) if verb == "dead_letter" else (1, 0))
        recounted(redis_server, redis_prefix)


@each_change
async def test_a_changed_record_of_a_lost_consumer(
    how: Changed, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29, law 1: a delivery whose record was changed is taken back from a consumer that leaves."""
    async with opened(redis_server.url, redis_prefix) as backend, asyncio.timeout(PATIENCE):
        await publish(backend, "t")
        async with backend.subscribe([KEY], "before") as consumer:
            await take(consumer, 1)
            change(redis_server, backend, how)
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(*await take(consumer, 1))
        ledger = await backend.control.ledger(KEY)
        assert ledger.balanced
        assert ledger.done == 1


@pytest.mark.parametrize("state", [returned, scheduled, held, dead])
async def test_a_retry_without_a_receipt(
    state: Callable[[RedisBackend], Awaitable[None]], redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29: a retry without a receipt moves a task whose record is damaged, and stores no second one."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await state(backend)
        cut(redis_server, name_of(backend), "t")
        due = backend.now() + 60.0
        await backend.publisher.schedule_retry(Task.of(KEY, "t", id="t"), due)
        ledger = await backend.control.ledger(KEY)
        assert ledger.balanced
        assert (ledger.scheduled, ledger.dead) == (1, 0)
        assert ledger.published == (2 if state is held else 1)
        recounted(redis_server, redis_prefix)


async def test_a_held_task_keeps_its_attempt(redis_server: RedisServer, redis_prefix: str) -> None:
    """U29: a task that waits for its ordering key keeps its attempt if its record is damaged."""
    async with opened(redis_server.url, redis_prefix) as backend, asyncio.timeout(PATIENCE):
        await backend.publisher.publish(Task.of(KEY, "t", id="t", ordering_key="e"))
        async with backend.subscribe([KEY], "c") as consumer:
            (delivery,) = await take(consumer, 1)
            for _ in range(2):
                await backend.publisher.schedule_retry(delivery.task, 0.0, settles=delivery)
                (delivery,) = await take(consumer, 1)
            await consumer.dead_letter(delivery, "broken")
            await backend.publisher.publish(Task.of(KEY, "first", id="first", ordering_key="e"))
            (first,) = await take(consumer, 1)
            await backend.dead_letters.redrive(KEY)
            cut(redis_server, name_of(backend), "t")
            await consumer.ack(first)
            (delivery,) = await take(consumer, 1)
            assert delivery.attempt == 3
            await consumer.ack(delivery)
        recounted(redis_server, redis_prefix)


@pytest.mark.parametrize("damage", [cut, remove])
@pytest.mark.parametrize("state", ["held", "released", "scheduled"])
async def test_a_deadline_is_kept(
    state: str,
    damage: Callable[[RedisServer, str, str], None],
    redis_server: RedisServer,
    redis_prefix: str,
) -> None:
    """U29: a task with a damaged record ends at its deadline, wherever it waits."""
    async with opened(redis_server.url, redis_prefix) as backend, asyncio.timeout(PATIENCE):
        deadline = backend.now() + 1.0
        task = Task.of(KEY, "t", id="t", deadline=deadline, ordering_key="e")
        if state == "held":
            await backend.publisher.publish(Task.of(KEY, "h", id="h", ordering_key="e"), task)
        else:
            await backend.publisher.publish(task)
        async with backend.subscribe([KEY], "c") as consumer:
            (delivery,) = await take(consumer, 1)
            if state == "released":
                await consumer.redeliver(delivery)
            elif state == "scheduled":
                publisher = backend.publisher
                await publisher.schedule_retry(delivery.task, deadline + 0.1, settles=delivery)
            damage(redis_server, name_of(backend), "t")
            redis_server.call("DEL", f"{name_of(backend)}/e")
            await until(lambda: backend.now() > deadline + 0.2, "the deadline has passed")
            async with housekept(backend):
                if state == "held":
                    await consumer.ack(delivery)
                await consumer.receive(1, 0.5)
                await until(lambda: _expired(backend), "the task has expired")
        assert (await backend.control.ledger(KEY)).balanced


async def _expired(backend: RedisBackend) -> bool:
    return (await backend.control.ledger(KEY)).expired == 1


async def test_a_deadline_of_a_held_task_is_not_delayed(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29: maintenance finds a task that waits for its ordering key by its id, and ends it at its deadline."""
    async with opened(redis_server.url, redis_prefix) as backend:
        tasks = [Task.of(KEY, n, id=n, ordering_key="e") for n in ("first", "second")]
        late = Task.of(KEY, "t", id="t", ordering_key="e", deadline=backend.now() + 0.2)
        await backend.publisher.publish(*tasks, late)
        cut(redis_server, name_of(backend), "t")
        async with housekept(backend):
            await until(lambda: _expired(backend), "the task has expired")
        recounted(redis_server, redis_prefix)


@pytest.mark.parametrize("order", [Order.FIFO, Order.FAIR])
async def test_an_entry_with_a_damaged_body(
    order: Order, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29, law 1: a task whose record and body were both damaged becomes a dead letter, in any order."""
    async with opened(redis_server.url, redis_prefix) as backend, asyncio.timeout(PATIENCE):
        await publish(backend, "t", "other")
        name = f"{name_of(backend)}/s5"
        (first, _), (last, _) = redis_server.call("XRANGE", name, "-", "+")
        redis_server.call("XDEL", name, first)
        redis_server.call("XADD", name, f"{int(last.split(b'-')[0]) + 1}-0", "t", "junkjunkjunk")
        redis_server.call("HSET", f"{name_of(backend)}/t", "t", bytes(20))
        await backend.control.configure(KEY, QueueSettings(order=order))
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(*await take(consumer, 1))
            await consumer.receive(1, 0.2)
        ledger = await backend.control.ledger(KEY)
        assert ledger.balanced
        assert (ledger.done, ledger.dead) == (1, 1)


async def test_a_second_entry_of_a_task(redis_server: RedisServer, redis_prefix: str) -> None:
    """U29: an entry with the id of a task that is elsewhere is deleted, and the books agree."""
    async with opened(redis_server.url, redis_prefix) as backend, asyncio.timeout(PATIENCE):
        await scheduled(backend)
        body = redis_server.call("HGET", f"{name_of(backend)}/b", "t")
        await publish(backend, "other")
        name = f"{name_of(backend)}/s5"
        last = redis_server.call("XREVRANGE", name, "+", "-")[0][0]
        redis_server.call("XADD", name, f"{int(last.split(b'-')[0]) + 1}-0", "t", body)
        async with backend.subscribe([KEY], "c") as consumer, housekept(backend):
            executed: list[str] = []
            while len(executed) < 2:
                (delivery,) = await take(consumer, 1)
                with contextlib.suppress(LeaseLost):
                    await consumer.ack(delivery)
                    executed.append(delivery.task.id)
            await until(lambda: _balanced(backend), "the ledger balances")
        assert sorted(executed) == ["other", "t"]


async def _balanced(backend: RedisBackend) -> bool:
    ledger = await backend.control.ledger(KEY)
    return ledger.balanced and ledger.in_flight == 0


async def test_a_listing_shows_damaged_tasks(redis_server: RedisServer, redis_prefix: str) -> None:
    """U29: a listing shows tasks with damaged records, in the state in which their entries are."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await dead(backend)
        await publish(backend, "unknown", "sound")
        cut(redis_server, name_of(backend), "t")
        redis_server.call("HSET", f"{name_of(backend)}/t", "unknown", b"x" * 20)
        async with TaskLister(settings_for(redis_server.url, prefix=redis_prefix)) as lister:
            listed = [task async for batch in lister.read(KEY, list(State)) for task in batch]
        assert {(task.task_id, task.state) for task in listed} == {
            ("t", State.DEAD),
            ("unknown", State.WAITING),
            ("sound", State.WAITING),
        }
        status, _ = await backend.control.statuses(KEY, "t", "sound")
        assert status is not None
        assert status.state is State.DEAD


async def test_an_entry_of_another_program_has_a_deadline(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29: an entry that is no task and is past its deadline stops no other task."""
    async with opened(redis_server.url, redis_prefix) as backend, housekept(backend):
        await publish(backend, "a")
        junk = ("foreign", "junkjunkjunk", "more", "1:0:0:5")
        last = redis_server.call("XREVRANGE", f"{name_of(backend)}/s5", "+", "-")[0][0]
        fence = int(last.split(b"-")[0]) + 1
        redis_server.call("XADD", f"{name_of(backend)}/s5", f"{fence}-0", *junk)
        await publish(backend, "b")
        executed: set[str] = set()
        async with backend.subscribe([KEY], "c") as consumer, asyncio.timeout(PATIENCE):
            while not {"a", "b"} <= executed:
                for delivery in (await consumer.receive(10, 1.0)).deliveries:
                    executed.add(delivery.task.id)
                    await consumer.ack(delivery)
