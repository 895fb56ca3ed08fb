"""Concurrency: a cancelled call loses nothing, and exactly one of several competing calls succeeds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Delivery, Published, Received, Settled

_HOPS = range(10)


async def _cut(bench: Bench, call: Coroutine[Any, Any, Any] | asyncio.Task[Any], hops: int) -> Any:
    """Cancel a call after ``hops`` rounds of the event loop.

    Return the result of the call, or ``None`` if the call had not ended.
    """
    running = asyncio.ensure_future(call)
    await bench.hop(hops)
    running.cancel()
    try:
        return await running
    except asyncio.CancelledError:
        return None


class ConcurrencySuite(Harness):
    """Tests of cancelled, competing and concurrent calls."""

    async def test_receive_cancelled(self, bench: Bench) -> None:
        """A receive that is cancelled at any point loses no task and counts no loss (laws 1, 3)."""
        subscription = bench.subscribe()
        for hops in _HOPS:
            await bench.publish(f"t{hops}")
            answer = await _cut(bench, subscription.receive(1, None), hops)
            await _all_there(bench, answer, [f"t{hops}"])

    async def test_waiting_receive_cancelled(self, bench: Bench) -> None:
        """A waiting receive that is cancelled when tasks arrive loses no task and counts no loss (laws 1, 3)."""
        subscription = bench.subscribe()
        for hops in _HOPS:
            waiting = await bench.start(subscription.receive(5, None))
            await bench.publish(f"a{hops}", f"b{hops}")
            answer = await _cut(bench, waiting, hops)
            await _all_there(bench, answer, [f"a{hops}", f"b{hops}"])

    async def test_receive_timed_out_by_the_caller(self, bench: Bench) -> None:
        """After a cancelled receive, the subscription receives as before (law 1)."""
        subscription = bench.subscribe()
        for number in range(3):
            waiting = await bench.start(subscription.receive(1, None))
            assert await _cut(bench, waiting, 1) is None
            await bench.publish(f"t{number}")
            again = await bench.start(subscription.receive(1, None))
            (delivery,) = (await bench.outcome(again)).deliveries
            await subscription.ack(delivery)

    async def test_wake_up_is_passed_on(self, bench: Bench) -> None:
        """If a receive is cancelled as it wakes up, another waiting receive gets the task (law 1)."""
        for hops in _HOPS:
            async with (
                bench.subscribe() as subscription,
                bench.subscribe(consumer="another") as two,
            ):
                waiters = [await bench.start(s.receive(1, None)) for s in (subscription, two)]
                await bench.publish(f"t{hops}")
                answer = await _cut(bench, waiters[hops % 2], hops // 2)
                retained = [] if answer is None else list(answer.deliveries)
                await (subscription, two)[hops % 2].redeliver(*retained)
                (delivery,) = (await bench.outcome(waiters[1 - hops % 2])).deliveries
                await subscription.ack(delivery)

    async def test_publish_cancelled(self, bench: Bench) -> None:
        """After a cancelled publish, publishing again leaves exactly one copy of each task (law 7)."""
        subscription = bench.subscribe()
        for hops in _HOPS:
            tasks = [bench.task(f"a{hops}"), bench.task(f"b{hops}")]
            await _cut(bench, bench.offer(*tasks), hops)
            await bench.hop(10)
            assert all(c.stored for c in await bench.offer(*tasks))
            taken = await bench.eventually(subscription, 2)
            assert sorted(ids(taken)) == [task.id for task in tasks]
            assert await bench.take(subscription) == [], "a resend made a second copy (law 7)"
            await subscription.ack(*taken)

    async def test_ack_cancelled(self, bench: Bench) -> None:
        """A cancelled ack can be repeated, and takes effect once (law 2)."""
        subscription = bench.subscribe()
        for hops in _HOPS:
            await bench.publish(f"t{hops}")
            delivery = await bench.one(subscription)
            await _cut(bench, subscription.ack(delivery), hops)
            assert await subscription.ack(delivery) == (Settled.OK,)
        await bench.expect(done=len(_HOPS))

    async def test_redeliver_cancelled(self, bench: Bench) -> None:
        """A cancelled release can be repeated, and makes the task available once (law 2)."""
        subscription = bench.subscribe()
        for hops in _HOPS:
            await bench.publish(f"t{hops}")
            delivery = await bench.one(subscription)
            await _cut(bench, subscription.redeliver(delivery), hops)
            assert await subscription.redeliver(delivery) == (Settled.OK,)
            (again,) = await bench.take(subscription, 2)
            assert (again.attempt, again.losses) == (1, 0)
            await subscription.ack(again)

    async def test_retry_cancelled(self, bench: Bench) -> None:
        """A cancelled retry can be repeated, and adds only one attempt (law 7)."""
        subscription = bench.subscribe()
        for hops in _HOPS:
            await bench.publish(f"t{hops}")
            delivery = await bench.one(subscription)
            await subscription.ack(delivery)
            await _cut(bench, bench.retry(delivery.task, token=f"t{hops}"), hops)
            answer = await bench.retry(delivery.task, token=f"t{hops}")
            assert answer in (Published.ACCEPTED, Published.DUPLICATE)
            (again,) = await bench.take(subscription, 2)
            assert again.attempt == 2
            await subscription.ack(again)

    async def test_close_cancelled(self, bench: Bench) -> None:
        """A cancelled close can be repeated, and releases every delivery (laws 1, 3)."""
        for hops in _HOPS:
            names = [f"a{hops}", f"b{hops}"]
            await bench.publish(*names)
            subscription, other = bench.subscribe(), bench.subscribe(consumer="another")
            await bench.take(subscription, 2)
            await _cut(bench, subscription.close(), hops)
            await subscription.close()
            taken = await bench.eventually(other, 2)
            assert ids(taken) == names
            await other.ack(*taken)

    async def test_same_task_published_at_once(self, bench: Bench) -> None:
        """Of many concurrent publishes of one task, exactly one is accepted (law 7)."""
        answers = await asyncio.gather(*(bench.statuses("t1") for _ in range(20)))
        statuses = [status for (status,) in answers]
        assert statuses.count(Published.ACCEPTED) == 1, statuses
        assert statuses.count(Published.DUPLICATE) == 19, statuses
        assert len(await bench.take(bench.subscribe(), 3)) == 1

    async def test_two_settlements_at_once(self, bench: Bench) -> None:
        """Of two concurrent settlements of one receipt, exactly one takes effect (law 2; OPEN-C4)."""
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        for number in range(5):
            await bench.publish(f"t{number}")
            delivery = await bench.one(subscription)
            calls = [subscription.ack(delivery), two.redeliver(delivery)]
            answers = await asyncio.gather(
                *(calls if number % 2 else calls[::-1]), return_exceptions=True
            )
            lost = [answer for answer in answers if isinstance(answer, LeaseLost)]
            assert len(lost) == 1, f"one of two settlements must raise LeaseLost: got {answers}"
            await two.ack(*await bench.take(two))
        await bench.expect(done=5)

    async def test_many_publishers_and_consumers(self, bench: Bench) -> None:
        """The 1,000 tasks of ten publishers are delivered to ten consumers, each task exactly once (laws 1, 2)."""
        deliveries: list[Delivery] = []
        settled: list[Settled] = []
        total = 1000

        async def produce(name: str) -> None:
            for start in range(0, 100, 5):
                names = [f"{name}-{number}" for number in range(start, start + 5)]
                await bench.publish(*names, key=KEY if start % 2 else OTHER)
                await bench.hop(1)

        async def consume(name: str) -> None:
            async with bench.subscribe(KEY, OTHER, consumer=name) as subscription:
                while len(deliveries) < total:
                    received = await subscription.receive(7, None)
                    deliveries.extend(received.deliveries)
                    settled.extend(await subscription.ack(*received.deliveries))
                    if len(settled) >= total:
                        finished.set()

        finished = asyncio.Event()
        consumers = [await bench.start(consume(f"c{n}")) for n in range(10)]
        await asyncio.gather(*(produce(f"p{n}") for n in range(10)))
        await bench.outcome(await bench.start(finished.wait()))
        for consumer in consumers:
            consumer.cancel()
        assert len(deliveries) == len(set(ids(deliveries))) == total, (
            "a task was delivered twice (law 2)"
        )
        await bench.expect(done=500)


async def _all_there(bench: Bench, answer: Received | None, names: list[str]) -> None:
    async with bench.subscribe(consumer="finder") as finder:
        deliveries = [] if answer is None else list(answer.deliveries)
        deliveries += await bench.eventually(finder, len(names) - len(deliveries))
        assert ids(deliveries) == names, (
            f"a cancelled receive lost or duplicated tasks: expected {names}, got {ids(deliveries)} (law 1)"
        )
        assert {(d.attempt, d.losses) for d in deliveries} == {(1, 0)}, (
            "a cancellation was counted as an attempt or a loss (law 3)"
        )
        await finder.ack(*deliveries)
