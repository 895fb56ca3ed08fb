"""Scheduled tasks: they are never delivered early, and become available when due, in the order of their times."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.consumer.settle import settle
from taskqueue_core.retry import ScheduleRetry
from taskqueue_core.tasks import Published


class ScheduleSuite(Harness):
    """Tests of ``not_before``."""

    async def test_never_early(self, bench: Bench) -> None:
        """A scheduled task is delivered at its time or later, and never before (law 8)."""
        at = bench.now + bench.short
        await bench.publish("t1", not_before=at)
        await bench.expect(scheduled=1)
        subscription = bench.subscribe()
        assert await bench.take(subscription) == [], "delivered before its time (law 8)"
        await bench.advance(bench.short / 2)
        assert await bench.take(subscription) == [], "delivered before its time (law 8)"
        await bench.advance(bench.short / 2)
        delivery = await bench.one(subscription)
        assert delivery.delivered_at >= at, "delivered before its time (law 8)"
        assert (delivery.attempt, delivery.losses) == (1, 0), "the wait was counted (law 3)"

    async def test_time_that_has_passed(self, bench: Bench) -> None:
        """A task with ``not_before`` in the past is available at once."""
        await bench.publish("t1", not_before=bench.now - 1)
        assert ids([await bench.one(bench.subscribe())]) == ["t1"]

    async def test_order_of_times(self, bench: Bench) -> None:
        """Scheduled tasks come in the order of their times, and with equal times in the order of publishing (law 4)."""
        soon, sooner = bench.now + bench.short, bench.now + bench.short / 2
        await bench.publish("b1", "b2", not_before=soon)
        await bench.publish("a1", "a2", not_before=sooner)
        await bench.publish("b3", not_before=soon)
        await bench.advance(bench.short)
        taken = ids(await bench.take(bench.subscribe(), 9))
        assert taken == ["a1", "a2", "b1", "b2", "b3"]

    async def test_place_among_others(self, bench: Bench) -> None:
        """A scheduled task gets its position in the lane according to the time at which it became due (law 4)."""
        await bench.publish("before")
        await bench.publish("due", not_before=bench.now + bench.short / 2)
        await bench.publish("between")
        await bench.advance(bench.short)
        await bench.publish("after")
        taken = ids(await bench.take(bench.subscribe(), 4))
        assert taken == ["before", "between", "due", "after"]

    async def test_priority_counts_when_due(self, bench: Bench) -> None:
        """Once a scheduled task is due, its priority decides when it is delivered (law 4)."""
        await bench.publish("high", not_before=bench.now + bench.short, priority=9)
        subscription = await bench.subscribed("low1", "low2", priority=1)
        assert ids([await bench.one(subscription)]) == ["low1"]
        await bench.advance(bench.short)
        assert ids(await bench.take(subscription, 3)) == ["high", "low2"]

    async def test_redelivered_is_not_put_off(self, bench: Bench) -> None:
        """A scheduled task that is released after a delivery is available again at once."""
        await bench.publish("t1", not_before=bench.now + bench.short)
        await bench.advance(bench.short)
        subscription = bench.subscribe()
        await subscription.redeliver(await bench.one(subscription))
        assert ids([await bench.one(subscription)]) == ["t1"]

    async def test_many_fall_due_together(self, bench: Bench) -> None:
        """Hundreds of tasks that are due at the same time are all delivered, in order (law 4)."""
        names = [f"t{n}" for n in range(300)]
        await bench.publish(*names, not_before=bench.now + bench.short)
        await bench.advance(bench.short)
        assert ids(await bench.take(bench.subscribe(), 301)) == names

    @needs(Capability.CONTROL)
    async def test_reschedule(self, bench: Bench) -> None:
        """A waiting or scheduled task gets another time, earlier or later, and keeps its attempt (laws 3, 8; U6)."""
        await bench.publish("later", not_before=bench.now + 3600)
        await bench.publish("now")
        soon = bench.now + bench.short
        for name in ("now", "later", "now"):
            assert await bench.control.reschedule(KEY, name, soon), f"{name} was not rescheduled"
        await bench.expect(scheduled=2)
        subscription = bench.subscribe()
        assert await bench.take(subscription) == [], "delivered before its new time (law 8)"
        await bench.advance(bench.short)
        taken = await bench.take(subscription, 3)
        assert ids(taken) == ["later", "now"]
        assert [(d.attempt, d.losses, d.prior) for d in taken] == [(1, 0, 0)] * 2
        await bench.publish("at-once", not_before=bench.now + 3600)
        assert await bench.control.reschedule(KEY, "at-once", bench.now)
        assert ids([await bench.one(subscription)]) == ["at-once"]

    @needs(Capability.CONTROL)
    async def test_what_cannot_be_rescheduled(self, bench: Bench) -> None:
        """A task that is unknown, running or has ended keeps its time, and so does a released one (laws 2, 3; U6)."""
        at = bench.now + bench.short
        assert not await bench.control.reschedule(KEY, "unknown", at)
        subscription, delivery = await bench.running("t1")
        assert not await bench.control.reschedule(KEY, "t1", at), "a running task was rescheduled"
        await subscription.redeliver(delivery)
        assert not await bench.control.reschedule(KEY, "t1", at), (
            "a release was put off, but comes back at once (law 3)"
        )
        delivery = await bench.one(subscription)
        await subscription.ack(delivery)
        assert not await bench.control.reschedule(KEY, "t1", at), "a done task was rescheduled"
        await bench.expect(done=1)

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_a_redriven_task_keeps_its_time(self, bench: Bench) -> None:
        """A task that was redriven comes back at once, with the attempt that was delivered before (law 3; U6)."""
        subscription, delivery = await bench.running("t1")
        await bench.bury(subscription, delivery)
        assert await bench.dead_letters.redrive(KEY, "t1") == 1
        assert not await bench.control.reschedule(KEY, "t1", bench.now + 3600), (
            "a redriven task was put off, but comes back at once (law 3)"
        )
        again = await bench.one(subscription)
        await settle(bench.backend, subscription, again, ScheduleRetry(3600, "failed"))
        assert await bench.control.reschedule(KEY, "t1", bench.now), "its retry was not rescheduled"
        await subscription.ack(await bench.one(subscription))

    @needs(Capability.CONTROL)
    async def test_a_retry_is_rescheduled(self, bench: Bench) -> None:
        """The time of a scheduled retry can be changed; its attempt stays (laws 3, 8; U6)."""
        subscription, delivery = await bench.running("t1")
        await settle(bench.backend, subscription, delivery, ScheduleRetry(3600, "failed"))
        assert await bench.control.reschedule(KEY, "t1", bench.now)
        again = await bench.one(subscription)
        assert again.attempt == 2
        await subscription.ack(again)

    @needs(Capability.CONTROL, Capability.FLOW)
    async def test_rescheduled_tasks_count(self, bench: Bench) -> None:
        """A rescheduled task counts against the capacity once, as before (law 6; U6)."""
        await bench.configure(capacity=2)
        await bench.publish("t1", "t2")
        for name in ("t1", "t2", "t1"):
            assert await bench.control.reschedule(KEY, name, bench.now + bench.short)
        task = bench.task("t3")
        (refused,) = await bench.backend.publisher.publish(task)
        assert (refused.status, refused.depth) == (Published.REFUSED, 2)
        await bench.advance(bench.short)
        assert len(await bench.take(bench.subscribe(), 3)) == 2
        (accepted,) = await bench.backend.publisher.publish(task)
        assert accepted.status is Published.ACCEPTED

    @needs(Capability.CONTROL, Capability.ORDERING_KEYS)
    async def test_a_rescheduled_task_frees_its_ordering_key(self, bench: Bench) -> None:
        """A task that was never delivered and is put off does not hold up others with its ordering key (law 4; U6)."""
        await bench.publish("e1", "e2", ordering_key="e")
        assert await bench.control.reschedule(KEY, "e1", bench.now + bench.short)
        subscription = bench.subscribe()
        second = await bench.one(subscription)
        assert second.task.id == "e2"
        await bench.advance(bench.short)
        assert await bench.take(subscription) == [], "two tasks with one ordering key ran (law 4)"
        await subscription.ack(second)
        assert ids([await bench.one(subscription)]) == ["e1"]

    async def test_due_at(self, bench: Bench) -> None:
        """An empty answer contains the time when the next task is due, so that consumers need not poll."""
        soon = bench.now + bench.short
        await bench.publish("far", not_before=bench.now + 3600)
        await bench.publish("near", not_before=soon)
        received = await bench.subscribe().receive(1, 0)
        assert received.deliveries == ()
        assert not received.again
        assert received.due_at is not None, "due_at must contain the time of a scheduled task"
        assert received.due_at <= soon
