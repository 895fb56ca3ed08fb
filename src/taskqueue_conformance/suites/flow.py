"""The capability ``flow``: limits on the number of tasks in flight, and pauses."""

from __future__ import annotations

import asyncio

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import (
    End,
    ack,
    bury,
    cancel,
    close,
    expire,
    frees,
    held,
    lose,
    poison,
    redeliver,
)
from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.tasks import Delivery


class FlowSuite(Harness, needs=(Capability.FLOW, Capability.CONTROL)):
    """Tests of ``max_inflight`` and ``paused``."""

    async def test_in_flight_limit(self, bench: Bench) -> None:
        """All workers together have at most ``max_inflight`` tasks in flight (law 5; F2)."""
        await bench.limit(max_inflight=3)
        await bench.publish("t1", "t2", "t3", "t4", "t5")
        item, two, three = (bench.subscribe(consumer=name) for name in ("w", "w", "another"))
        taken = [await bench.take(subscription, 2) for subscription in (item, two, three)]
        assert [len(deliveries) for deliveries in taken] == [2, 1, 0]
        for subscription in (item, two, three):
            assert (await held(subscription)).due_at is None, (
                "due_at must be None: the time of the next delivery is unknown"
            )
        await two.ack(taken[1][0])
        assert ids(await bench.take(three, 2)) == ["t4"]

    async def test_in_flight_limit_side_by_side(self, bench: Bench) -> None:
        """Concurrent receives together deliver exactly as many tasks as the limit allows (laws 5, 10; F2)."""
        await bench.limit(max_inflight=7)
        await bench.publish(*(f"t{n}" for n in range(30)))
        subscriptions = [bench.subscribe(consumer=f"w{n}") for n in range(10)]
        await asyncio.gather(*(subscription.receive(2, 0) for subscription in subscriptions))
        await bench.expect(in_flight=7, waiting=23)

    async def test_waiting_for_a_place_costs_nothing(self, bench: Bench) -> None:
        """A task that ``max_inflight`` delayed is delivered with attempt 1 (laws 3, 5; FIX-C3)."""
        await bench.limit(max_inflight=1)
        subscription, first = await bench.running("t1", "t2")
        for _ in range(10):
            await held(subscription)
        await subscription.ack(first)
        second = await bench.one(subscription)
        assert (second.task.id, second.attempt, second.losses) == ("t2", 1, 0)
        stats = await bench.control.stats(KEY)
        assert (stats.delivered, stats.redelivered, stats.retried) == (2, 0, 0)

    async def test_settling_frees_the_place(self, bench: Bench) -> None:
        """Every settlement wakes a receive that ``max_inflight`` blocks (law 5; F2)."""
        for end in (ack, redeliver, lose, close):
            await _frees(bench, end)

    @needs(Capability.DEAD_LETTERS)
    async def test_dying_frees_the_place(self, bench: Bench) -> None:
        """Turning a running task into a dead letter wakes a receive that ``max_inflight`` blocks (law 5; F2)."""
        for end in (bury, poison):
            await _frees(bench, end)

    @needs("atomic_retry")
    async def test_retrying_frees_the_place(self, bench: Bench) -> None:
        """Scheduling a retry of a running task wakes a receive that ``max_inflight`` blocks (law 5; F2)."""

        async def settle(bench: Bench, _: Subscription, delivery: Delivery) -> None:
            await bench.retry(delivery.task, 3600, settles=delivery)

        async def from_afar(bench: Bench, _: Subscription, delivery: Delivery) -> None:
            await bench.retry(delivery.task, 3600)

        for end in (settle, from_afar):
            await _frees(bench, end)

    async def test_ending_frees_the_place(self, bench: Bench) -> None:
        """Cancelling or expiring a running task wakes a receive that ``max_inflight`` blocks (law 5; F2)."""
        await _frees(bench, cancel)
        await _frees(bench, expire, deadline=bench.short)

    @needs(Capability.HANDOVER)
    async def test_adopting_takes_no_place(self, bench: Bench) -> None:
        """An adopted delivery counts against ``max_inflight`` as before (law 5)."""
        await bench.limit(max_inflight=1)
        await bench.publish("t1", "t2")
        subscription, two = bench.subscribe(), bench.subscribe()
        delivery = await bench.one(subscription)
        assert await bench.adopt(two, delivery.receipt) != (None,)
        await subscription.close()
        await held(two)
        await two.ack(delivery)
        assert ids(await bench.take(two, 2)) == ["t2"]

    async def test_in_flight_limit_changes(self, bench: Bench) -> None:
        """A raised or removed ``max_inflight`` wakes a waiting receive at once (laws 5, 9; F7)."""
        await bench.limit(max_inflight=1)
        subscription = await bench.subscribed("t1", "t2", "t3", "t4")
        await bench.one(subscription)
        for limit, matches in ((2, ["t2"]), (None, ["t3", "t4"])):
            change = bench.limit(max_inflight=limit)
            assert await bench.wakes(subscription.receive(5, None), change) == matches

    async def test_lowering_takes_nothing_away(self, bench: Bench) -> None:
        """A lower limit ends no delivery; the next delivery waits until the limit allows it (laws 3, 5, 9)."""
        subscription = await bench.subscribed("t1", "t2", "t3", "t4")
        running = await bench.take(subscription, 3)
        await bench.limit(max_inflight=1)
        for delivery in running:
            await held(subscription)
            await subscription.ack(delivery)
        assert ids(await bench.take(subscription, 2)) == ["t4"]

    async def test_one_queue_does_not_hold_up_another(self, bench: Bench) -> None:
        """A queue at its in-flight limit does not delay a subscription's other queues (law 5)."""
        await bench.limit(max_inflight=1)
        await bench.publish("t1", "t2", "t3")
        await bench.publish("o1", "o2", "o3", key=OTHER)
        subscription = bench.subscribe(KEY, OTHER)
        assert sorted(ids(await bench.take(subscription, 9))) == ["o1", "o2", "o3", "t1"]
        await held(subscription)
        late = bench.publish("o4", key=OTHER)
        assert await bench.wakes(subscription.receive(5, None), late) == ["o4"]

    async def test_pause(self, bench: Bench) -> None:
        """A receive from a paused queue returns nothing and raises no error; other calls work as before (law 5; F6)."""
        subscription, delivery = await bench.running("running", "t1")
        await bench.limit(paused=True)
        assert (await held(subscription)).due_at is None, (
            "due_at must be None: the time of the next delivery is unknown"
        )
        await bench.publish("t2")
        await bench.publish("t3", not_before=bench.now + bench.short)
        await subscription.ack(delivery)
        await bench.retry(delivery.task)
        await bench.advance(bench.short)
        await held(subscription)
        await bench.limit(paused=False)
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["t1", "t2", "running", "t3"], "a pause must keep the order (law 4)"
        assert [delivery.attempt for delivery in taken] == [1, 1, 2, 1]

    async def test_pause_and_a_waiting_receive(self, bench: Bench) -> None:
        """A waiting receive gets no tasks during a pause, and wakes when the pause ends (laws 5, 9; F6, F7)."""
        subscription = bench.subscribe()
        waiting = await bench.start(subscription.receive(5, None))
        await bench.limit(paused=True)
        await bench.publish("t1")
        await bench.publish("t2", not_before=bench.now + bench.short)
        await bench.advance(bench.short)
        await bench.hop(20)
        assert not waiting.done(), "delivered although paused (law 5)"
        await bench.limit(paused=False)
        assert ids((await bench.outcome(waiting)).deliveries) == ["t1", "t2"]

    async def test_pause_is_of_one_queue(self, bench: Bench) -> None:
        """A paused queue does not stop the other queues of a subscription (law 5; F6)."""
        await bench.limit(paused=True)
        await bench.publish("t1")
        await bench.publish("o1", key=OTHER)
        subscription = bench.subscribe(KEY, OTHER)
        assert ids(await bench.take(subscription, 9)) == ["o1"]
        await held(subscription)

    @needs("shared")
    async def test_places_on_every_replica(self, bench: Bench) -> None:
        """Replicas share the count of tasks in flight, and apply limits set at another replica (laws 5, 9; F2, F7)."""
        other = await bench.replica()
        await other.limit(max_inflight=1)
        await bench.publish("t1", "t2", "t3")
        here, there = bench.subscribe(), other.subscribe(consumer="another")
        delivery = await bench.one(here)
        assert await bench.wakes(there.receive(1, None), here.ack(delivery)) == ["t2"]
        await bench.limit(max_inflight=None, paused=True)
        await held(there)
        assert await bench.wakes(there.receive(1, None), bench.limit(paused=False)) == ["t3"]


async def _frees(bench: Bench, end: End, *, deadline: float | None = None) -> None:
    await bench.limit(max_inflight=1)
    await frees(bench, end, deadline=deadline)
