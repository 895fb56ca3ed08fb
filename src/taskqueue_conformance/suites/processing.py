"""The capability ``flow``: a delivery that exceeds its processing time is ended, unless it reports progress."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import held
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Settled, State


class ProcessingSuite(Harness, needs=(Capability.FLOW, Capability.CONTROL)):
    """Tests of ``max_processing_time``."""

    async def test_hung_comes_back(self, bench: Bench) -> None:
        """A delivery is ended at ``max_processing_time`` with one loss, and not before (laws 2, 3; C18)."""
        await bench.limit(max_processing_time=4 * bench.short)
        subscription, delivery = await bench.running("hung")
        await bench.advance(2 * bench.short)
        assert await _recovered(bench) == 0, "the delivery was ended too early"
        await bench.expect(in_flight=1)
        await bench.advance(2 * bench.short)
        assert await _recovered(bench) == 1
        await bench.expect(waiting=1)
        (again,) = await bench.take(bench.subscribe(consumer="another"), 9)
        assert (again.task.id, again.attempt, again.losses) == ("hung", 1, 1)
        await bench.stale(subscription.ack(delivery))
        assert not await bench.control.progress(delivery, 0.5)
        stats = await bench.control.stats(KEY)
        assert (stats.redelivered, stats.lost) == (1, 1)

    async def test_late_settlements(self, bench: Bench) -> None:
        """In a batch, the receipt of an overdue delivery is stale; the other deliveries are settled (law 2; C18)."""
        await bench.limit(max_processing_time=2 * bench.short)
        subscription, hung, fine = await bench.all_running("hung", "fine")
        await bench.advance(bench.short)
        assert await bench.control.progress(fine, 0.5)
        await bench.advance(bench.short)
        assert await _recovered(bench) == 1
        answers = await subscription.ack(hung, fine)
        assert answers == (Settled.LEASE_LOST, Settled.OK)
        if bench.backend.capabilities.atomic_retry:
            await bench.stale(bench.retry(hung.task, settles=hung))
        await bench.expect(waiting=1, done=1)

    async def test_progress_prolongs(self, bench: Bench) -> None:
        """A delivery that reports progress is never ended, however long it takes (law 3; OPEN-C3, C18)."""
        await bench.limit(max_processing_time=2 * bench.short)
        subscription, delivery = await bench.running("long")
        for step in range(8):
            await bench.advance(bench.short)
            assert await bench.control.progress(delivery, step / 10 if step % 2 else f"step {step}")
            assert await _recovered(bench) == 0, "a delivery with progress was ended"
        assert await subscription.ack(delivery) == (Settled.OK,)
        await bench.advance(4 * bench.short)
        assert await _recovered(bench) == 0
        await bench.expect(done=1)

    async def test_last_progress_counts(self, bench: Bench) -> None:
        """A delivery is ended ``max_processing_time`` after its last progress report (law 3; C18)."""
        await bench.limit(max_processing_time=4 * bench.short)
        _, delivery = await bench.running("hung")
        await bench.advance(3 * bench.short)
        await bench.control.progress(delivery, "the last word")
        await bench.advance(3 * bench.short)
        assert await _recovered(bench) == 0
        await bench.advance(bench.short)
        assert await _recovered(bench) == 1
        await bench.expect(waiting=1)

    async def test_change_acts_on_what_follows(self, bench: Bench) -> None:
        """A delivery keeps the ``max_processing_time`` that applied when it was delivered (law 9; C18)."""
        subscription, before = await bench.running("before", "after")
        await bench.limit(max_processing_time=2 * bench.short)
        await bench.one(subscription)
        await bench.limit(max_processing_time=None)
        await bench.advance(2 * bench.short)
        assert await _recovered(bench) == 1, "exactly one delivery must end"
        assert ids(await bench.take(subscription, 9)) == ["after"]
        assert await subscription.ack(before) == (Settled.OK,)

    async def test_change_acts_from_the_next_progress(self, bench: Bench) -> None:
        """After a progress report, the ``max_processing_time`` that is set then applies (law 9; C18)."""
        unit = bench.short
        subscription, first = await bench.running("first", "second")
        for old, new, ends in ((None, 2, 2), (2, 4, 4), (4, 1, 1), (2, None, None)):
            await bench.limit(max_processing_time=old and old * unit)
            if (old, new) != (None, 2):
                first = await bench.one(subscription)
            await bench.limit(max_processing_time=new and new * unit)
            assert await bench.control.progress(first, "noted")
            await bench.advance(((ends or 5) - 1) * unit)
            assert await _recovered(bench) == 0, f"ended too early: {old} to {new}"
            await bench.advance(unit)
            assert await _recovered(bench) == (ends is not None), f"{old} to {new}"
            if ends is None:
                assert await subscription.ack(first) == (Settled.OK,)

    async def test_timeout_comes_with_each_delivery(self, bench: Bench) -> None:
        """A delivery has the ``timeout`` that applied when it was delivered, also a later attempt (law 9; U3)."""
        subscription, first = await bench.running("first", "second")
        await bench.limit(timeout=1.5)
        second = await bench.one(subscription)
        await bench.limit(timeout=0.25)
        await subscription.redeliver(second)
        again = await bench.one(subscription)
        await bench.retry(first.task, settles=first)
        if not bench.backend.capabilities.atomic_retry:
            await subscription.ack(first)
        third = await bench.one(subscription)
        await bench.limit(timeout=None)
        await subscription.redeliver(again, third)
        last = await bench.take(subscription, 2)
        assert [d.timeout for d in (first, second, again, third)] == [None, 1.5, 0.25, 0.25]
        assert (third.task.id, third.attempt) == ("first", 2)
        assert [d.timeout for d in last] == [None, None]

    async def test_hung_too_often(self, bench: Bench) -> None:
        """A task that is overdue more than ``max_losses`` times becomes a dead letter (law 3; C18)."""
        await bench.limit(max_processing_time=bench.short, max_losses=1)
        subscription = await bench.subscribed("hung")
        for losses in (0, 1):
            assert (await bench.one(subscription)).losses == losses
            await bench.advance(bench.short)
            assert await _recovered(bench) == 1
        await bench.expect(dead=1)
        assert await bench.state("hung") is State.DEAD
        assert await bench.take(subscription) == []

    @needs(Capability.REVOCATION)
    async def test_worker_is_notified(self, bench: Bench) -> None:
        """Only the receipt of the overdue delivery is reported as revoked (law 2; C18)."""
        await bench.limit(max_processing_time=2 * bench.short)
        subscription, hung, fine = await bench.all_running("hung", "fine")
        waiting = await bench.start(bench.revoked(subscription))
        await bench.advance(bench.short)
        await bench.control.progress(fine, 0.5)
        await bench.advance(bench.short)
        await _recovered(bench)
        assert await bench.outcome(waiting) == (hung.receipt,)
        assert await subscription.ack(fine) == (Settled.OK,)

    async def test_place_comes_free(self, bench: Bench) -> None:
        """When an overdue delivery ends, its task goes to a receive that ``max_inflight`` blocked (laws 4, 5; C18)."""
        await bench.limit(max_processing_time=2 * bench.short, max_inflight=1)
        await bench.running("hung", "next")
        two = bench.subscribe(consumer="another")
        await held(two)
        waiting = await bench.start(two.receive(5, None))
        await bench.advance(2 * bench.short)
        await _recovered(bench)
        taken = (await bench.outcome(waiting)).deliveries
        assert ids(taken) == ["hung"]
        await two.ack(*taken)
        assert ids(await bench.take(two, 9)) == ["next"]

    async def test_settled_is_over(self, bench: Bench) -> None:
        """A task that is released and delivered again has the full processing time again (law 2)."""
        await bench.limit(max_processing_time=3 * bench.short)
        await bench.publish("acked", "returned")
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        acked, returned = await bench.take(subscription, 2)
        await bench.advance(2 * bench.short)
        await subscription.ack(acked)
        await subscription.redeliver(returned)
        delivery = await bench.one(two)
        await bench.advance(2 * bench.short)
        assert await _recovered(bench) == 0, "the time must start again with the second delivery"
        assert await two.ack(delivery) == (Settled.OK,)
        await bench.expect(done=2)

    @needs(Capability.HANDOVER, Capability.REVOCATION)
    async def test_adopted_has_its_time(self, bench: Bench) -> None:
        """An adopted delivery becomes overdue at its original time, and its new subscription is notified (law 2)."""
        await bench.limit(max_processing_time=2 * bench.short)
        old, delivery = await bench.running("hung")
        new = bench.subscribe()
        await bench.advance(bench.short)
        await bench.adopt(new, delivery.receipt)
        await old.close()
        waiting = await bench.start(bench.revoked(new))
        await bench.advance(bench.short)
        assert await _recovered(bench) == 1
        assert await bench.outcome(waiting) == (delivery.receipt,)

    async def test_many_hang(self, bench: Bench) -> None:
        """All overdue deliveries are ended with one loss each, and no other delivery is ended (laws 1, 3, 10; C18)."""
        await bench.limit(max_processing_time=2 * bench.short)
        await bench.publish(*(f"t{n}" for n in range(150)))
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        hung = await bench.take(subscription, 100)
        await bench.advance(bench.short)
        fine = await bench.take(two, 50)
        await bench.advance(bench.short)
        assert await _recovered(bench) == len(hung)
        await bench.expect(in_flight=50, waiting=100)
        again = await bench.take(two, 100)
        assert [(d.task.id, d.losses) for d in again] == [(f"t{n}", 1) for n in range(100)]
        assert set(await two.ack(*fine)) == {Settled.OK}


async def _recovered(bench: Bench) -> int:
    """Run maintenance until it finds nothing to do; return the number of overdue deliveries that it ended."""
    recovered = 0
    for _ in range(20):
        done = await bench.control.maintain()
        recovered += done.recovered
        if not (done.recovered or done.promoted or done.expired):
            break
    return recovered
