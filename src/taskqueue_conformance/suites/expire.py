"""Deadlines: a task is never delivered after its deadline; it expires, and is reported once."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Delivery, Expired, State


class ExpireSuite(Harness):
    """Tests of ``deadline``."""

    async def test_before_and_at(self, bench: Bench) -> None:
        """A task is delivered before its deadline, and never at or after it (law 8)."""
        at = bench.now + bench.short
        subscription = await bench.subscribed("early", "late", deadline=at)
        assert (await bench.one(subscription)).task.id == "early"
        await bench.advance(bench.short)
        assert await bench.take(subscription) == [], "delivered at its deadline (law 8)"

    async def test_reported_by_receive(self, bench: Bench) -> None:
        """A receive that finds expired tasks reports each of them once, and delivers the tasks behind them (law 8)."""
        await bench.publish("t1", "t2", deadline=bench.now + bench.short)
        await bench.publish("t3")
        await bench.advance(bench.short)
        subscription = bench.subscribe()
        expired: list[Expired] = []
        taken: list[Delivery] = []
        for _ in range(10):
            received = await subscription.receive(5, 0)
            expired += received.expired
            taken += received.deliveries
        assert ids(taken) == ["t3"]
        assert expired == [Expired(KEY, "t1", 1), Expired(KEY, "t2", 1)]
        await bench.expect(in_flight=1, expired=2)

    @needs(Capability.CONTROL)
    async def test_reported_by_maintenance(self, bench: Bench) -> None:
        """Maintenance expires overdue tasks, and reports each of them once (law 8; A23, OPEN-A6)."""
        await bench.publish("waiting", deadline=bench.now + bench.short)
        await bench.publish(
            "scheduled", deadline=bench.now + bench.short, not_before=bench.now + 3600
        )
        await bench.publish("fine", deadline=bench.now + 3600)
        await bench.advance(3 * bench.short)
        expired = [entry for _ in range(5) for entry in (await bench.control.maintain()).expired]
        assert sorted(entry.task_id for entry in expired) == ["scheduled", "waiting"]
        assert (await bench.subscribe().receive(1, 0)).expired == (), "reported twice"
        assert await bench.state("waiting") is State.EXPIRED
        await bench.expect(in_flight=1, expired=2)

    @needs(Capability.CONTROL)
    async def test_running_task(self, bench: Bench) -> None:
        """Maintenance expires a running task at its deadline; its receipt is then stale (laws 2, 8; A23)."""
        subscription, delivery = await bench.running("t1", deadline=bench.now + bench.short)
        await bench.advance(bench.short)
        expired = [entry for _ in range(3) for entry in (await bench.control.maintain()).expired]
        assert expired == [Expired(KEY, "t1", 1)]
        await bench.stale(subscription.ack(delivery))
        await bench.expect(expired=1)

    async def test_released_too_late(self, bench: Bench) -> None:
        """A task that is released after its deadline is not delivered again (law 8)."""
        subscription, delivery = await bench.running("t1", deadline=bench.now + bench.short)
        await bench.advance(bench.short)
        await subscription.redeliver(delivery, delivery)
        received = await subscription.receive(1, 0)
        assert received.deliveries == (), "delivered after its deadline (law 8)"
        await bench.expect(expired=1)

    async def test_retried_too_late(self, bench: Bench) -> None:
        """A retry that is due after the deadline is not delivered (law 8)."""
        subscription, delivery = await bench.running("t1", deadline=bench.now + bench.short)
        await subscription.ack(delivery)
        await bench.retry(delivery.task, 2 * bench.short)
        await bench.advance(3 * bench.short)
        assert await bench.take(subscription) == [], "delivered after its deadline (law 8)"

    async def test_published_too_late(self, bench: Bench) -> None:
        """A task published after its deadline expires at once: it is counted, but not delivered (laws 1, 8)."""
        await bench.publish("t1", deadline=bench.now - 1)
        assert await bench.take(bench.subscribe()) == []
        await bench.expect(expired=1)

    async def test_ack_keeps_the_deadline_away(self, bench: Bench) -> None:
        """A task that was acked before its deadline does not expire later (law 2)."""
        subscription, delivery = await bench.running("t1", deadline=bench.now + bench.short)
        await subscription.ack(delivery)
        await bench.advance(2 * bench.short)
        if await bench.take(subscription) == []:
            await bench.expect(done=1)
