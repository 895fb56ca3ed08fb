"""Calls that end early: cancelled at each of their awaits, or with their answer lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from types import coroutine
from typing import Any, NamedTuple, Protocol

import pytest

from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Delivery, Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.receiver import Receiver
from taskqueue_redis.subscription import RedisSubscription
from tests.chaos.proxy import FaultProxy
from tests.redis.backends import KEY, PATIENCE, opened, publish, take, until
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

KEYS = [f"{KEY}{n}" for n in range(6)]
MOST = 25
"""more awaits than any call has"""


class Cancelled(NamedTuple):
    """The result of a call that was to be cancelled at a certain await."""

    reached: bool
    answer: Any = None


@coroutine
def _counting(call: Any, point: int, *, late: bool) -> Generator[Any, Any, Cancelled]:
    # Run a call, and cancel the current task at the call's await number `point`: at once, or only when the awaited
    # result is available.
    steps = call.__await__()
    task = asyncio.current_task()
    assert task is not None
    go_on, value, number = steps.send, None, 0
    while True:
        try:
            future = go_on(value)
        except StopIteration as stop:
            return Cancelled(number >= point, stop.value)
        number += 1
        if number == point and late and future is not None:
            future.add_done_callback(lambda _: task.cancel())
        elif number == point:
            asyncio.get_running_loop().call_soon(task.cancel)
        try:
            value = yield future
            go_on = steps.send
        except BaseException as error:  # noqa: BLE001 - the call handles the exception
            value, go_on = error, steps.throw


async def cancelled_at(call: Awaitable[Any], point: int, *, late: bool) -> Cancelled:
    """Run a call and cancel it at its await number ``point``."""

    async def run() -> Cancelled:
        outcome: Cancelled = await _counting(call, point, late=late)
        return outcome

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    return Cancelled(reached=True) if task.cancelled() else task.result()


class Case(Protocol):
    """A test of a call that is cancelled at a certain await; returns whether the call reached it."""

    async def __call__(self, point: int, *, late: bool) -> bool:
        """Run the test."""
        ...


async def at_each_point(case: Case) -> int:
    """Run a test for each await of its call, with early and late cancellation; return the number of awaits."""
    for point in range(1, MOST):
        reached = [await case(point, late=late) for late in (False, True)]
        if not any(reached):
            return point - 1
    raise AssertionError("it waits on and on")


async def drained(consumer: RedisSubscription, number: int) -> list[Delivery]:
    """Receive and ack ``number`` deliveries; assert that each comes once and that no others follow."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < number:
            deliveries = (await consumer.receive(10, 1.0)).deliveries
            found += deliveries
            await consumer.ack(*deliveries)
    assert len({(d.task.key, d.task.id) for d in found}) == len(found) == number
    assert (await consumer.receive(10, 0)).deliveries == ()
    return found


@pytest.mark.parametrize("partitions", [1, 4])
async def test_a_cancelled_receive(redis_url: str, redis_prefix: str, partitions: int) -> None:
    """A9, D8, fault E4: wherever a receive is cancelled, each task is still delivered once and without a loss."""
    async with opened(redis_url, redis_prefix, partitions=partitions) as backend:

        async def case(point: int, *, late: bool) -> bool:
            name = f"{point}-{late}"
            for key in KEYS:
                await publish(backend, name, key=key)
            async with backend.subscribe(KEYS, "c") as consumer:
                outcome = await cancelled_at(consumer.receive(3, 0), point, late=late)
                answer = outcome.answer.deliveries if outcome.answer else ()
                await consumer.ack(*answer)
                found = await drained(consumer, len(KEYS) - len(answer))
                assert {(d.losses, d.attempt) for d in found} == {(0, 1)}
            return outcome.reached

        assert await at_each_point(case) >= 3
        for key in KEYS:
            ledger = await backend.control.ledger(key)
            assert (ledger.published, ledger.in_flight) == (ledger.done, 0)


@pytest.mark.parametrize("partitions", [1, 4])
async def test_a_cancelled_waiting_receive(
    redis_url: str, redis_prefix: str, partitions: int
) -> None:
    """Fault E4: a receive that is cancelled while it waits or is woken leaves all tasks for the next receive."""
    async with (
        opened(redis_url, redis_prefix, partitions=partitions) as backend,
        backend.subscribe(KEYS, "c") as consumer,
    ):
        for turn in range(20):
            receive = asyncio.create_task(consumer.receive(3, None))
            await until(lambda: consumer.asleep, "it waits")
            publishing = asyncio.create_task(publish(backend, f"t{turn}", key=KEYS[turn % 6]))
            for _ in range(turn):
                await asyncio.sleep(0)
            receive.cancel()
            await publishing
            await asyncio.wait([receive])
            answer = () if receive.cancelled() else receive.result().deliveries
            await consumer.ack(*answer)
            await drained(consumer, 1 - len(answer))


async def test_a_cancelled_publish(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """Fault E4, law 7: a cancelled publish is stored completely or not at all.

    Publishing again completes it, with one copy of each task.
    """
    async with opened(redis_url, redis_prefix) as backend:

        async def case(point: int, *, late: bool) -> bool:
            tasks = [Task(key=key, id=f"{point}-{late}") for key in KEYS]
            outcome = await cancelled_at(backend.publisher.publish(*tasks), point, late=late)
            # The store executes this publish after the cancelled one.
            await publish(backend, f"{point}-{late}", key="after")
            known = [(await backend.control.statuses(t.key, t.id))[0] for t in tasks]
            assert len({status is None for status in known}) == 1
            assert all(answer.stored for answer in await backend.publisher.publish(*tasks))
            return outcome.reached

        points = await at_each_point(case)
        books = recounted(redis_server, redis_prefix)
        assert {book["published"] for book in books.values()} == {2 * (points + 1)}


@pytest.mark.parametrize("verb", ["ack", "redeliver", "dead_letter", "schedule_retry"])
async def test_a_cancelled_settlement(
    redis_server: RedisServer, redis_url: str, redis_prefix: str, verb: str
) -> None:
    """A14, faults E4 and E2: a cancelled settlement that is sent again takes effect exactly once.

    No delivery stays in flight.
    """
    ends = {
        "ack": "done", "redeliver": "waiting", "dead_letter": "dead", "schedule_retry": "scheduled",
    }  # fmt: skip
    async with opened(redis_url, redis_prefix) as backend, backend.subscribe([KEY], "c") as one:

        async def settle(delivery: Delivery) -> None:
            if verb == "schedule_retry":
                at = backend.now() + 1000
                await backend.publisher.schedule_retry(delivery.task, at, settles=delivery)
            else:
                more = ["why"] if verb == "dead_letter" else []
                await getattr(one, verb)(delivery, *more)

        async def case(point: int, *, late: bool) -> bool:
            name = f"{point}-{late}"
            await publish(backend, name, priority=9)
            (delivery,) = await take(one, 1)
            outcome = await cancelled_at(settle(delivery), point, late=late)
            await settle(delivery)
            (status,) = await backend.control.statuses(KEY, name)
            assert status is not None
            assert (status.state, status.losses) == (ends[verb], 0)
            if verb == "redeliver":
                await one.ack(*await take(one, 1))
            assert backend._context.receipts.of(one) == []
            return outcome.reached

        assert await at_each_point(case) >= 1
        assert recounted(redis_server, redis_prefix)[KEY]["in_flight"] == 0


class Lossy(NamedTuple):
    """A backend behind a proxy that can lose answers, and another backend on the same store."""

    proxy: FaultProxy
    backend: RedisBackend
    other: RedisBackend


@asynccontextmanager
async def lossy(server: RedisServer, prefix: str, **values: Any) -> AsyncIterator[Lossy]:
    """Open a backend behind a proxy, and another one without it."""
    async with AsyncExitStack() as opening:
        proxy = await opening.enter_async_context(FaultProxy(("127.0.0.1", server.port)))
        url = f"redis://127.0.0.1:{proxy.address[1]}"
        yield Lossy(
            proxy,
            await opening.enter_async_context(opened(url, prefix, **values)),
            await opening.enter_async_context(opened(server.url, prefix, **values)),
        )


async def test_a_lost_answer_is_read_again_before_anything_new(
    each_redis: RedisServer, redis_prefix: str
) -> None:
    """BUG-D2, D12, D7, faults E3 and E2: after a lost answer, its tasks are delivered first and in order.

    They count as the same delivery.
    """
    async with lossy(each_redis, redis_prefix) as (proxy, backend, other):
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.receive(1, 0)
            await publish(other, *(f"t{n}" for n in range(6)))
            proxy.lose_replies(1, after=b"EVALSHA")
            with pytest.raises(BackendUnavailable, match="response was lost"):
                await consumer.receive(3, 0)
            assert (await other.control.ledger(KEY)).in_flight == 3
            await publish(other, "urgent", priority=9)
            first = (await consumer.receive(2, 0)).deliveries
            rest = [*(await consumer.receive(2, 0)).deliveries, *await take(consumer, 4, limit=9)]
            ids = [d.task.id for d in (*first, *rest)]
            assert ids == ["t0", "t1", "t2", "urgent", "t3", "t4", "t5"]
            assert {(d.attempt, d.losses) for d in (*first, *rest)} == {(1, 0)}
            await consumer.ack(*first, *rest)
        stats = await other.control.stats(KEY)
        assert (stats.delivered, stats.redelivered, stats.ledger.done) == (7, 0, 7)


async def test_a_late_receive_takes_nothing(redis_url: str, redis_prefix: str) -> None:
    """Fault E3: a receive request that arrives after the consumer gave it up takes no task."""
    async with (
        opened(redis_url, redis_prefix) as backend,
        backend.subscribe([KEY], "c") as consumer,
    ):
        await consumer.receive(1, 0)
        await publish(backend, "t")
        intake: Receiver = consumer._receiver
        held = intake._turn
        intake._mark_uncertain(intake._partitions[0])
        await intake._read_in_flight()
        name = intake._partitions[0]
        with pytest.raises(BackendUnavailable) as refused:
            await backend._context.scripts.run("receive", name, consumer.token, held, 1, 1)
        assert "given this receive up" in str(refused.value.__cause__)
        assert (await backend.control.ledger(KEY)).waiting == 1
        assert [d.task.id for d in await take(consumer, 1)] == ["t"]


async def test_one_partition_of_several_fails(
    redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A9, fault E3: if one of several partitions fails in a receive, no task of any partition is lost.

    Tasks of the failed partition are delivered later.
    """
    async with (
        opened(redis_url, redis_prefix, partitions=4) as backend,
        backend.subscribe(KEYS, "c") as consumer,
    ):
        await consumer.receive(1, 0)
        scripts = backend._context.scripts
        real, fails = scripts.run, [0]

        async def run(name: str, partition: str, *words: Any, **more: Any) -> Any:
            told = await real(name, partition, *words, **more)
            if name == "receive":
                fails[0] += 1
                if fails[0] == point:
                    raise BackendUnavailable("lost") from AnswerLost("lost")
            return told

        from taskqueue_redis.connection.failures import AnswerLost  # noqa: PLC0415

        for point in range(1, 12):
            for key in KEYS:
                await publish(backend, f"t{point}", key=key)
            monkeypatch.setattr(scripts, "run", run)
            fails[0] = 0
            try:
                found = (await consumer.receive(10, 0)).deliveries
            except BackendUnavailable:
                found = ()
            monkeypatch.setattr(scripts, "run", real)
            await consumer.ack(*found)
            await drained(consumer, len(KEYS) - len(found))


async def test_when_it_was_delivered(each_redis: RedisServer, redis_prefix: str) -> None:
    """E4, law 2: a delivery that is found again after a lost answer keeps its original delivery time."""
    async with (
        opened(each_redis.url, redis_prefix) as backend,
        backend.subscribe([KEY], "c") as consumer,
    ):
        await publish(backend, "t")
        (lost,) = await take(consumer, 1)
        backend._context.receipts.forget(lost.receipt)  # simulates a lost answer
        backend._context.clock.offsets.update(
            dict.fromkeys(backend._context.clock.offsets, -10.0)
        )  # simulates a late answer
        await asyncio.sleep(0.05)
        intake: Receiver = consumer._receiver
        intake._mark_uncertain(intake._partitions[0])
        (found,) = await take(consumer, 1)
        assert found.receipt == lost.receipt
        assert abs(found.delivered_at - lost.delivered_at) <= 0.002
