"""Waiting: a receive sleeps until a task is available, and wakes at every event that makes a task available."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability


class WaitingSuite(Harness):
    """Tests of `Subscription.receive` calls that wait for a task."""

    async def test_available_ends_the_wait_before_it_begins(self, bench: Bench) -> None:
        """A receive returns at once if a task is available, whatever its timeout."""
        subscription = await bench.subscribed("t1", "t2")
        for timeout in (None, 3600.0):
            waiting = await bench.start(subscription.receive(1, timeout))
            assert len((await bench.outcome(waiting)).deliveries) == 1

    async def test_timeout(self, bench: Bench) -> None:
        """A receive returns no deliveries when its timeout has passed, and not before."""
        waiting = await bench.start(bench.subscribe().receive(1, bench.short))
        assert not waiting.done(), "the wait ended before its time"
        await bench.advance(bench.short)
        assert (await bench.outcome(waiting)).deliveries == ()

    async def test_wait_after_a_timeout(self, bench: Bench) -> None:
        """A subscription whose receive timed out can receive as before."""
        subscription = bench.subscribe()
        waiting = await bench.start(subscription.receive(1, bench.short))
        await bench.advance(bench.short)
        await bench.outcome(waiting)
        assert await bench.wakes(subscription.receive(5, None), bench.publish("t1")) == ["t1"]

    async def test_publish_wakes(self, bench: Bench) -> None:
        """A publish to any of a subscription's keys wakes its receive, with or without a timeout (OPEN-E1)."""
        subscription = bench.subscribe(OTHER, "gamma", KEY)
        assert await bench.wakes(subscription.receive(5, None), bench.publish("t1")) == ["t1"]
        late = bench.publish("late", key=OTHER)
        assert await bench.wakes(subscription.receive(5, 3600.0), late) == ["late"]

    async def test_redelivery_wakes(self, bench: Bench) -> None:
        """A release wakes a receive of another consumer at once (REV-E3)."""
        subscription, delivery = await bench.running("t1")
        two = bench.subscribe(consumer="another")
        assert await bench.wakes(two.receive(1, None), subscription.redeliver(delivery)) == ["t1"]

    async def test_close_wakes(self, bench: Bench) -> None:
        """Closing a subscription with a running task wakes a receive of another consumer at once (REV-E3)."""
        subscription, _ = await bench.running("t1")
        two = bench.subscribe(consumer="another")
        assert await bench.wakes(two.receive(1, None), subscription.close()) == ["t1"]

    async def test_due_time_wakes(self, bench: Bench) -> None:
        """A scheduled task wakes a waiting receive when it is due, and not before (law 8)."""
        at = bench.now + bench.short
        await bench.publish("t1", not_before=at)
        waiting = await bench.start(bench.subscribe().receive(1, None))
        await bench.advance(bench.short)
        (delivery,) = (await bench.outcome(waiting)).deliveries
        assert delivery.delivered_at >= at

    async def test_task_scheduled_meanwhile_wakes(self, bench: Bench) -> None:
        """A receive that is already waiting wakes for the earliest task that is scheduled while it waits (law 8)."""
        waiting = await bench.start(bench.subscribe().receive(2, None))
        await bench.publish("far", not_before=bench.now + 3600)
        await bench.publish("near", not_before=bench.now + bench.short)
        await bench.advance(bench.short)
        assert ids((await bench.outcome(waiting)).deliveries) == ["near"]

    async def test_due_retry_wakes(self, bench: Bench) -> None:
        """A retry that becomes due wakes a waiting receive (law 8; D3)."""
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        waiting = await bench.start(subscription.receive(1, None))
        await bench.retry(delivery.task, bench.short)
        await bench.advance(bench.short)
        assert [d.attempt for d in (await bench.outcome(waiting)).deliveries] == [2]

    @needs(Capability.DEAD_LETTERS)
    async def test_redrive_wakes(self, bench: Bench) -> None:
        """A redriven task wakes a waiting receive."""
        subscription, delivery = await bench.running("t1")
        await bench.bury(subscription, delivery)
        waiting = await bench.start(subscription.receive(1, None))
        assert await bench.dead_letters.redrive(KEY) == 1
        assert ids((await bench.outcome(waiting)).deliveries) == ["t1"]

    async def test_every_waiter_wakes(self, bench: Bench) -> None:
        """Ten tasks published in one batch wake ten consumers, one task each."""
        waiters = [
            await bench.start(bench.subscribe(consumer=f"w{n}").receive(1, None)) for n in range(10)
        ]
        await bench.publish(*(f"t{n}" for n in range(10)))
        taken = [ids((await bench.outcome(waiting)).deliveries) for waiting in waiters]
        assert sorted(taken) == sorted([f"t{n}"] for n in range(10))

    async def test_closed_waiter_passes_its_wake_up_on(self, bench: Bench) -> None:
        """If one of two waiting subscriptions is closed, the other subscription gets the task."""
        for order in (0, 1):
            subscriptions = [bench.subscribe(consumer=f"w{n}") for n in range(2)]
            waiters = [await bench.start(s.receive(1, None)) for s in subscriptions]
            await bench.publish(f"t{order}")
            await subscriptions[order].close()
            received = await bench.outcome(waiters[1 - order])
            assert ids(received.deliveries) == [f"t{order}"]
            await subscriptions[1 - order].ack(*received.deliveries)
            await subscriptions[1 - order].close()
