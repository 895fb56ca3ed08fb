"""Scheduled tasks: they are never delivered early, and become available when due, in the order of their times."""

from __future__ import annotations

from taskqueue_conformance.bench import Bench, ids
from taskqueue_conformance.harness import Harness


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
