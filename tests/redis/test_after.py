"""Tasks that wait for others, on a real server: what the conformance kit cannot see."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskqueue_core.after import INPUTS_TOO_LARGE, PARENT_ENDED, UNKNOWN_PARENT, After, TaskRef
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Delivery, Published, Refusal, State, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, take
from tests.redis.carrying import carry
from tests.redis.largest import LARGE
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

FAR = "far"
"""a queue in another partition than `KEY`, if there are four"""


def after(*ids: str, key: str = KEY, **more: Any) -> After:
    """Return what a task waits for that waits for tasks of one queue."""
    return After(tasks=tuple(TaskRef(key, name) for name in ids), **more)


async def state(backend: RedisBackend, name: str, key: str = KEY) -> State:
    """Return the state of a task."""
    (status,) = await backend.control.statuses(key, name)
    assert status is not None
    return status.state


async def publish(backend: RedisBackend, *tasks: Task) -> None:
    """Publish tasks and assert that they are accepted."""
    for answer in await backend.publisher.publish(*tasks):
        assert answer.status is Published.ACCEPTED, answer


async def one(subscription: Any, name: str) -> Delivery:
    """Receive one task, the one with this name."""
    (delivery,) = await take(subscription, 1, limit=1)
    assert delivery.task.id == name
    return delivery


async def test_a_chain(redis_server: RedisServer, redis_prefix: str) -> None:
    """A chain of one call runs link by link, each with the result of the one before."""
    async with opened(
        redis_server.url, redis_prefix, clock=ManualClock(1_700_000_000.0)
    ) as backend:
        tasks = [Task(key=KEY, id="0")]
        tasks += [
            Task(key=KEY, id=str(n), after=after(str(n - 1), inputs=(0,))) for n in range(1, 9)
        ]
        await publish(backend, *tasks)
        assert (await backend.control.ledger(KEY)).blocked == 8
        recounted(redis_server, redis_prefix)
        async with backend.subscribe([KEY], "c") as consumer:
            for n in range(9):
                delivery = await one(consumer, str(n))
                assert delivery.task == tasks[n]
                assert delivery.inputs == ((str(n - 1).encode(),) if n else ())
                await consumer.ack(delivery, results=[str(n).encode()])
        assert (await backend.control.ledger(KEY)).done == 9
        assert not await backend.dependencies.lines(10)
        recounted(redis_server, redis_prefix)


async def test_more_children_than_one_step_informs(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """A parent informs 16 of its children in the step of its end, and the others by lines."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await publish(backend, Task(key=KEY, id="p"))
        await publish(
            backend,
            *(Task(key=KEY, id=f"c{n:03}", after=after("p", inputs=(0,))) for n in range(40)),
        )
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(await one(consumer, "p"), results=[b"1"])
            assert (await backend.control.ledger(KEY)).waiting == 16
            assert await carry(backend.dependencies) == 24
            for delivery in await take(consumer, 40):
                assert delivery.inputs == (b"1",)
                await consumer.ack(delivery)
        recounted(redis_server, redis_prefix)


async def test_a_parent_that_is_retried_after_its_end(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """A child of the second task with an id does not learn of the end of the first one, which is still to be told."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await publish(backend, Task(key=KEY, id="p"))
        names = [f"c{number:02}" for number in range(30)]
        await publish(backend, *(Task(key=KEY, id=name, after=after("p")) for name in names))
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(await one(consumer, "p"))
            await backend.publisher.schedule_retry(Task(key=KEY, id="p"), backend.now() - 1)
            await publish(backend, Task(key=KEY, id="late", after=after("p")))
            assert await backend.dependencies.register(*await backend.dependencies.lines(1)) == (
                None,
            )  # not before the children of the first one were informed
            assert await carry(backend.dependencies) == 15
            assert await state(backend, "late") is State.BLOCKED
            taken = {each.task.id: each for each in await take(consumer, 31)}
            assert taken.keys() == {"p", *names}
            await consumer.ack(*taken.values())
            await carry(backend.dependencies)
            await consumer.ack(await one(consumer, "late"))
        recounted(redis_server, redis_prefix)


async def test_a_dead_parent_holds(redis_server: RedisServer, redis_prefix: str) -> None:
    """A dead letter holds its children until it is redriven or discarded; those that want it go on or end."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await publish(
            backend,
            Task(key=KEY, id="p"),
            Task(key=KEY, id="hold", after=after("p")),
            Task(key=KEY, id="give-up", after=after("p", on_dead="cancel")),
            Task(key=KEY, id="finally", after=after("p", when="ended")),
            Task(key=KEY, id="failed", after=after("p", when="failed")),
            Task(key=KEY, id="follows", after=after("give-up")),
        )
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.dead_letter(await one(consumer, "p"), "why")
            (held,) = await backend.control.statuses(KEY, "hold")
            assert held is not None
            assert (held.state, held.held_by) == (State.BLOCKED, (TaskRef(KEY, "p"),))
            statuses = await backend.control.statuses(KEY, "give-up", "follows")
            assert [(s and s.state, s and s.error) for s in statuses] == [
                (State.CANCELLED, PARENT_ENDED)
            ] * 2
            for name in ("failed", "finally"):
                await consumer.ack(await one(consumer, name))
            assert await backend.dead_letters.redrive(KEY, "p") == 1
            (held,) = await backend.control.statuses(KEY, "hold")
            assert held is not None
            assert held.held_by == ()
            await consumer.dead_letter(await one(consumer, "p"), "why")
            assert await backend.dead_letters.discard(KEY, "p") == 1
            assert await state(backend, "hold") is State.CANCELLED
        assert not await backend.dependencies.lines(10)
        recounted(redis_server, redis_prefix)


@asynccontextmanager
async def spread(server: RedisServer, prefix: str) -> AsyncIterator[RedisBackend]:
    """Open a backend with four partitions."""
    async with opened(server.url, prefix, partitions=4) as backend:
        of = backend._context.scripts.partitions.of
        assert of(KEY) != of(FAR)
        yield backend


async def test_across_partitions(redis_server: RedisServer, redis_prefix: str) -> None:
    """A child learns of the ends of parents in another partition by lines, in whatever order they are carried."""
    async with spread(redis_server, redis_prefix) as backend:
        await publish(
            backend,
            Task(key=FAR, id="early"),
            Task(key=KEY, id="c", after=after("early", "late", key=FAR, inputs=(1, 0))),
            Task(key=FAR, id="late", after=after("early", key=FAR)),
            Task(key=KEY, id="lost", after=after("nobody", key=FAR)),
        )
        async with backend.subscribe([FAR], "c") as consumer:
            await consumer.ack(await one(consumer, "early"), results=[b"1"])
            assert await carry(backend.dependencies) == 3
            assert await state(backend, "c") is State.BLOCKED
            (status,) = await backend.control.statuses(KEY, "lost")
            assert status is not None
            assert (status.state, status.error) == (State.CANCELLED, UNKNOWN_PARENT)
            late = await one(consumer, "late")
            await consumer.dead_letter(late, "why")
            assert await carry(backend.dependencies) == 1
            (status,) = await backend.control.statuses(KEY, "c")
            assert status is not None
            assert status.held_by == (TaskRef(FAR, "late"),)
            await backend.dead_letters.redrive(FAR)
            await consumer.ack(await one(consumer, "late"), results=[b"2"])
            assert await carry(backend.dependencies) == 1
        async with backend.subscribe([KEY], "c") as consumer:
            delivery = await one(consumer, "c")
            assert delivery.inputs == (b"2", b"1")
            again = (await consumer.adopt(delivery.receipt))[0]
            assert again is not None
            assert again.inputs == delivery.inputs
            await consumer.redeliver(delivery)
            delivery = await one(consumer, "c")
            assert delivery.inputs == (b"2", b"1")
            await consumer.ack(delivery)
        for partition in range(4):
            recounted(redis_server, redis_prefix, partition)


async def test_too_large_inputs(redis_server: RedisServer, redis_prefix: str) -> None:
    """Inputs that are too large together make a dead letter; after a redrive it runs without them."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await publish(
            backend,
            Task(key=KEY, id="a"),
            Task(key=KEY, id="b"),
            Task(key=KEY, id="c", after=after("a", "b", inputs=(0, 1))),
        )
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(*await take(consumer, 2), results=[LARGE, LARGE])
            (status,) = await backend.control.statuses(KEY, "c")
            assert status is not None
            assert (status.state, status.error) == (State.DEAD, INPUTS_TOO_LARGE)
            recounted(redis_server, redis_prefix)
            await backend.dead_letters.redrive(KEY)
            delivery = await one(consumer, "c")
            assert delivery.inputs == ()
            await consumer.ack(delivery)


@pytest.mark.parametrize("way", ["cancel", "purge", "expire"])
async def test_ends_of_blocked_tasks(
    redis_server: RedisServer, redis_prefix: str, way: str
) -> None:
    """Blocked tasks can be cancelled, purged and expire; nothing is left of them."""
    clock = ManualClock(1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        deadline = clock.now() + 10
        await publish(
            backend,
            Task(key="parents", id="p"),
            Task(key=KEY, id="c", after=after("p", key="parents"), deadline=deadline),
            Task(key=KEY, id="d", after=after("c"), deadline=deadline),
        )
        if way == "cancel":
            assert await backend.control.cancel(KEY, "c")
        elif way == "purge":
            assert await backend.control.purge(KEY) == 2
        else:
            await clock.advance(20)
            await backend.control.maintain()
        ended = State.EXPIRED if way == "expire" else State.CANCELLED
        assert await state(backend, "c") is ended
        assert await state(backend, "d") in {ended, State.CANCELLED}
        recounted(redis_server, redis_prefix)
        await backend.control.delete(KEY)
        async with backend.subscribe(["parents"], "c") as consumer:
            await consumer.ack(await one(consumer, "p"))
        recounted(redis_server, redis_prefix)


async def test_a_blocked_task_gets_another_time(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """A blocked task that is rescheduled stays blocked, and is scheduled at its release."""
    clock = ManualClock(1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        await publish(backend, Task(key=KEY, id="p"), Task(key=KEY, id="c", after=after("p")))
        assert await backend.control.reschedule(KEY, "c", clock.now() + 60)
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(await one(consumer, "p"))
            (status,) = await backend.control.statuses(KEY, "c")
            assert status is not None
            assert (status.state, status.due_at) == (State.SCHEDULED, clock.now() + 60)
            recounted(redis_server, redis_prefix)
            await clock.advance(61)
            await consumer.ack(await one(consumer, "c"))


@pytest.mark.parametrize("failing", [False, True])
async def test_a_batch(redis_server: RedisServer, redis_prefix: str, *, failing: bool) -> None:
    """A batch ends when it is closed and all of its members have ended, in whatever partitions they are."""
    batch = TaskRef("batches", "b")
    async with spread(redis_server, redis_prefix) as backend:
        await publish(
            backend,
            Task(key=batch.key, id=batch.task_id, batch=batch),
            Task(key="batches", id="then", after=After(tasks=(batch,))),
            Task(key="batches", id="failed", after=After(tasks=(batch,), when="failed")),
        )
        members = [Task(key=key, id=f"{n}", batch=batch) for key in (KEY, FAR) for n in range(5)]
        await publish(backend, *members)
        again = await backend.publisher.publish(*members)
        assert {answer.status for answer in again} == {Published.DUPLICATE}
        async with backend.subscribe([KEY, FAR], "c") as consumer:
            taken = await take(consumer, 10)
            await consumer.ack(*taken[:4])
            assert await backend.dependencies.close(batch)
            await carry(backend.dependencies)
            (answer,) = await backend.publisher.publish(Task(key=KEY, id="late", batch=batch))
            assert (answer.status, answer.code) == (Published.REFUSED, Refusal.BATCH_CLOSED)
            assert await state(backend, "b", "batches") is State.BLOCKED
            await consumer.dead_letter(taken[4], "why")
            await consumer.ack(*taken[5:])
            await carry(backend.dependencies)
            assert await state(backend, "b", "batches") is State.BLOCKED
            key = taken[4].task.key
            if failing:
                await backend.dead_letters.discard(key)
            else:
                await backend.dead_letters.redrive(key)
                await consumer.ack(*await take(consumer, 1))
            await carry(backend.dependencies)
        states = [await state(backend, name, "batches") for name in ("b", "then", "failed")]
        if failing:
            assert states == [State.CANCELLED, State.CANCELLED, State.WAITING]
        else:
            assert states == [State.DONE, State.WAITING, State.CANCELLED]
        assert not await backend.dependencies.close(batch)
        for partition in range(4):
            recounted(redis_server, redis_prefix, partition)
