"""Retries: a retry is a new attempt at a later time, which any client may schedule, once per token."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.consumer.settle import settle
from taskqueue_core.retry import ScheduleRetry
from taskqueue_core.tasks import Delivery, Published, Settled

ACCEPTED, DUPLICATE = Published.ACCEPTED, Published.DUPLICATE


class RetrySuite(Harness):
    """Tests of `Publisher.schedule_retry`."""

    async def test_retry_through_core(self, bench: Bench) -> None:
        """A failed task runs again once, after the retry delay, as the next attempt (law 8; D3, REV-E1, REV-E2)."""
        subscription = await bench.subscribed("t1")
        for attempt in (1, 2, 3):
            delivery = await bench.one(subscription)
            assert delivery.attempt == attempt
            verb = ScheduleRetry(bench.short, "failed")
            assert await settle(bench.backend, subscription, delivery, verb) is Settled.OK
            assert await bench.take(subscription) == [], "a retry was delivered early (law 8)"
            await bench.advance(bench.short)
        delivery = await bench.one(subscription)
        assert (delivery.attempt, delivery.losses) == (4, 0)
        assert await bench.take(subscription) == [], "a retry made two copies (law 7)"

    @needs("atomic_retry")
    async def test_settling_moves_the_entry(self, bench: Bench) -> None:
        """One call ends the delivery and schedules the next attempt (laws 1, 2; REV-E1, G2)."""
        subscription, delivery = await bench.running("t1")
        assert await _retry(bench, delivery) is ACCEPTED
        await bench.expect(scheduled=1)
        await bench.stale(subscription.ack(delivery))
        await bench.stale(subscription.redeliver(delivery))
        await bench.advance(bench.short)
        assert [d.attempt for d in await bench.take(subscription, 2)] == [2]
        await bench.expect(in_flight=1)

    @needs("atomic_retry")
    async def test_settling_twice(self, bench: Bench) -> None:
        """A retry that is sent again is a duplicate, and changes nothing (law 2)."""
        subscription, delivery = await bench.running("t1")
        assert await _retry(bench, delivery) is ACCEPTED
        assert await _retry(bench, delivery) is DUPLICATE
        await bench.advance(bench.short)
        (again,) = await bench.take(subscription, 2)
        assert again.attempt == 2, "a resent retry was counted (law 2)"

    @needs("atomic_retry")
    async def test_settling_by_a_stale_receipt(self, bench: Bench) -> None:
        """A retry with a stale receipt raises `LeaseLost` and changes nothing (law 2; OPEN-A7)."""
        subscription, old = await bench.running("t1")
        await subscription.redeliver(old)
        await bench.stale(_retry(bench, old))
        new = await bench.one(subscription)
        await bench.stale(_retry(bench, old))
        assert await subscription.ack(new) == (Settled.OK,)
        await bench.stale(_retry(bench, new))
        await bench.expect(done=1)

    @needs("atomic_retry")
    async def test_running_task_without_its_delivery(self, bench: Bench) -> None:
        """A retry without a delivery also reschedules a running task, whose receipt is then stale (laws 1, 2)."""
        subscription, delivery = await bench.running("t1")
        assert await bench.retry(delivery.task, bench.short, error="failed") is ACCEPTED
        await bench.expect(scheduled=1)
        await bench.stale(subscription.ack(delivery))
        await bench.advance(bench.short)
        assert [d.attempt for d in await bench.take(subscription, 2)] == [2]

    @needs("atomic_retry")
    async def test_waiting_and_scheduled_tasks(self, bench: Bench) -> None:
        """A retry moves a waiting or scheduled task to the new time, and creates no copy (laws 1, 8)."""
        tasks = await bench.publish("t1")
        tasks += await bench.publish("t2", not_before=bench.now + 3600)
        for task in tasks:
            assert await bench.retry(task, bench.short) is ACCEPTED
        subscription = bench.subscribe()
        assert await bench.take(subscription) == [], "a moved entry was delivered early (law 8)"
        await bench.expect(scheduled=2)
        await bench.advance(bench.short)
        assert ids(await bench.take(subscription, 3)) == ["t1", "t2"]

    async def test_ended_task(self, bench: Bench) -> None:
        """A retry of an ended task creates a new entry, which counts as published (law 1; REV-E2)."""
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        confirmation = await bench.backend.publisher.schedule_retry(
            delivery.task, bench.now + bench.short, error="failed later"
        )
        assert confirmation.status is ACCEPTED
        assert confirmation.task_id == "t1"
        await bench.expect(done=1, scheduled=1)
        assert await bench.take(subscription) == [], "a retry was delivered early (law 8)"
        await bench.advance(bench.short)
        again = await bench.one(subscription)
        assert (again.attempt, again.task) == (2, delivery.task)
        await subscription.ack(again)
        await bench.expect(done=2)

    @needs(Capability.DEAD_LETTERS, "atomic_retry")
    async def test_dead_task(self, bench: Bench) -> None:
        """A retry of a dead letter makes the task live again; ``prior`` is its number of earlier attempts (law 1)."""
        subscription, delivery = await bench.running("t1")
        await bench.bury(subscription, delivery)
        assert await bench.retry(delivery.task, bench.short, error="failed") is ACCEPTED
        await bench.expect(scheduled=1)
        assert await bench.dead_letters.list(KEY) == ()
        await bench.advance(bench.short)
        again = await bench.one(subscription)
        assert (again.attempt, again.prior) == (2, 1)

    async def test_forgotten_task(self, bench: Bench) -> None:
        """A retry of a task that the store does not know is accepted (law 6)."""
        task = bench.task("unheard-of")
        assert await bench.retry(task, bench.short) is ACCEPTED
        await bench.expect(scheduled=1)
        await bench.advance(bench.short)
        delivery = await bench.one(bench.subscribe())
        assert delivery.task == task

    async def test_default_token(self, bench: Bench) -> None:
        """Without a token, one retry is accepted for each delivered attempt (law 7)."""
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        for expected in (ACCEPTED, DUPLICATE, DUPLICATE):
            assert await bench.retry(delivery.task, bench.short) is expected
        await bench.advance(2 * bench.short)
        (again,) = await bench.take(subscription, 2)
        await subscription.ack(again)
        assert await bench.retry(delivery.task) is ACCEPTED, (
            "a retry of the next attempt was refused"
        )
        assert (await bench.one(subscription)).attempt == 3

    async def test_explicit_token(self, bench: Bench) -> None:
        """A token is accepted once, in any state of the task; another token schedules another retry (law 7)."""
        subscription, delivery = await bench.running("t1")
        first, second = "a", "b"
        await subscription.ack(delivery)
        assert await bench.retry(delivery.task, token=first) is ACCEPTED
        assert await bench.retry(delivery.task, token=first) is DUPLICATE
        again = await bench.one(subscription)
        assert await bench.retry(delivery.task, token=first) is DUPLICATE
        assert await subscription.ack(again) == (Settled.OK,)
        assert await bench.retry(delivery.task, token=first) is DUPLICATE
        assert await bench.retry(delivery.task, token=second) is ACCEPTED
        assert (await bench.one(subscription)).attempt == 3

    async def test_place_in_the_lane(self, bench: Bench) -> None:
        """A retry that becomes due goes behind tasks that became available earlier (law 4; REV-E1)."""
        subscription, delivery = await bench.running("t1")
        await bench.publish("t2", "t3")
        await settle(bench.backend, subscription, delivery, ScheduleRetry(bench.short, "failed"))
        await bench.advance(bench.short)
        await bench.publish("t4")
        assert ids(await bench.take(subscription, 5)) == ["t2", "t3", "t1", "t4"]

    async def test_never_dropped(self, bench: Bench) -> None:
        """Hundreds of scheduled retries are all delivered, however many new tasks arrive (law 6; REV-E4)."""
        names = [f"t{n}" for n in range(300)]
        subscription = await bench.subscribed(*names)
        for delivery in await bench.take(subscription, 300):
            verb = ScheduleRetry(bench.short, "failed")
            assert await settle(bench.backend, subscription, delivery, verb) is Settled.OK
        await bench.publish(*(f"new{n}" for n in range(300)))
        await bench.advance(bench.short)
        taken = await bench.take(subscription, 700)
        assert ids(d for d in taken if d.attempt == 2) == names, "retries were dropped (law 6)"

    async def test_free_retry(self, bench: Bench) -> None:
        """A retry that is free raises the attempt and ``prior`` alike, so it costs none of the attempts (law 3; U5)."""
        subscription = await bench.subscribed("t1")
        for attempt in (1, 2, 3):
            delivery = await bench.one(subscription)
            counts = delivery.attempt, delivery.prior, delivery.losses
            assert counts == (attempt, attempt - 1, 0), "a free retry was counted (law 3)"
            verb = ScheduleRetry(bench.short, None, free=True)
            assert await settle(bench.backend, subscription, delivery, verb) is Settled.OK
            assert await bench.take(subscription) == [], "a retry was delivered early (law 8)"
            await bench.advance(bench.short)
        delivery = await bench.one(subscription)
        assert (delivery.attempt, delivery.prior) == (4, 3)
        await settle(bench.backend, subscription, delivery, ScheduleRetry(0, "failed"))
        delivery = await bench.one(subscription)
        assert (delivery.attempt, delivery.prior) == (5, 3), "a counted retry changed prior"

    @needs(Capability.DEAD_LETTERS, "atomic_retry")
    async def test_free_retry_of_a_dead_letter(self, bench: Bench) -> None:
        """A retry of a dead letter makes all attempts available again; that it is free adds none (law 1; U5)."""
        subscription, delivery = await bench.running("t1")
        await bench.bury(subscription, delivery)
        assert await bench.retry(delivery.task, bench.short, free=True) is ACCEPTED
        await bench.expect(scheduled=1)
        await bench.advance(bench.short)
        again = await bench.one(subscription)
        assert (again.attempt, again.prior) == (2, 1)

    async def test_lost_and_retried(self, bench: Bench) -> None:
        """A retry starts with 0 losses, whatever the losses of the previous attempt (law 3)."""
        subscription, delivery = await bench.running("t1")
        await subscription.redeliver(delivery, lost=True)
        delivery = await bench.one(subscription)
        await settle(bench.backend, subscription, delivery, ScheduleRetry(0, "failed"))
        again = await bench.one(subscription)
        assert (again.attempt, again.losses) == (2, 0)


async def _retry(bench: Bench, delivery: Delivery) -> Published:
    return await bench.retry(delivery.task, bench.short, error="failed", settles=delivery)
