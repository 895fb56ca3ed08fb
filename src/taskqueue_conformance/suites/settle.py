"""Settling: a receipt can be settled once, a stale receipt changes nothing, and a release is not a failure."""

from __future__ import annotations

import msgspec
import pytest

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.errors import LeaseLost, SubscriptionClosed
from taskqueue_core.tasks import Settled

OK, LOST = Settled.OK, Settled.LEASE_LOST


class SettleSuite(Harness):
    """Tests of `Subscription.ack` and `Subscription.redeliver`."""

    async def test_ack_ends(self, bench: Bench) -> None:
        """An acked task is done, and is never delivered again (E3)."""
        subscription, delivery = await bench.running("t1")
        assert await subscription.ack(delivery) == (OK,)
        await subscription.close()
        assert await bench.take(bench.subscribe()) == []
        await bench.expect(done=1)

    async def test_redeliver_is_immediate(self, bench: Bench) -> None:
        """A released task is available at once, with the same attempt and losses (law 3; REV-E1, REV-E3, E3, G2)."""
        subscription, delivery = await bench.running("t1")
        assert await subscription.redeliver(delivery) == (OK,)
        await bench.expect(waiting=1)
        again = await bench.one(bench.subscribe(consumer="another"))
        assert (again.task.id, again.attempt, again.losses) == ("t1", 1, 0)

    async def test_returned_comes_first(self, bench: Bench) -> None:
        """Released tasks keep their order, and come before tasks that were never delivered (law 4; D2, E5)."""
        subscription = await bench.subscribed("t1", "t2", "t3", "t4", "t5")
        delivery, two, three = await bench.take(subscription, 3)
        await subscription.redeliver(three)
        await subscription.redeliver(delivery)
        await bench.publish("t6")
        await subscription.redeliver(two)
        assert ids(await bench.take(subscription, 9)) == ["t1", "t2", "t3", "t4", "t5", "t6"]

    async def test_returned_comes_first_again_and_again(self, bench: Bench) -> None:
        """A task keeps its position in the lane after many releases (law 4)."""
        subscription = await bench.subscribed("t1", "t2", "t3")
        for _ in range(5):
            taken = await bench.take(subscription, 2)
            assert ids(taken) == ["t1", "t2"]
            await subscription.redeliver(*reversed(taken))
        assert ids(await bench.take(subscription, 3)) == ["t1", "t2", "t3"]

    async def test_returned_stays_in_its_priority(self, bench: Bench) -> None:
        """A released task is first in its lane, but does not overtake a higher priority (law 4)."""
        subscription, low = await bench.running("low1", "low2", priority=1)
        await bench.publish("high", priority=8)
        await subscription.redeliver(low)
        assert ids(await bench.take(subscription, 3)) == ["high", "low1", "low2"]

    async def test_waiting_burns_nothing(self, bench: Bench) -> None:
        """A task that is released many times stays live, at attempt 1 (law 3; FIX-C3)."""
        subscription = await bench.subscribed("t1", max_attempts=1)
        for _ in range(30):
            assert await subscription.redeliver(await bench.one(subscription)) == (OK,)
        delivery = await bench.one(subscription)
        assert (delivery.attempt, delivery.losses) == (1, 0), "a release was counted (law 3)"

    async def test_loss_is_counted(self, bench: Bench) -> None:
        """A reported loss increases the losses of a task, but never its attempt (law 3; OPEN-A5)."""
        subscription = await bench.subscribed("t1")
        for losses in range(3):
            delivery = await bench.one(subscription)
            assert (delivery.attempt, delivery.losses) == (1, losses)
            assert await subscription.redeliver(delivery, lost=True) == (OK,)
        await subscription.redeliver(await bench.one(subscription))
        assert (await bench.one(subscription)).losses == 3, "a release changed the losses (law 3)"

    async def test_batch_answers_per_receipt(self, bench: Bench) -> None:
        """A batch settles current receipts and answers ``LEASE_LOST`` for stale receipts, in order (law 2)."""
        subscription, delivery, two, three = await bench.all_running("t1", "t2", "t3")
        await subscription.redeliver(two)
        assert await subscription.ack(delivery, two, three) == (OK, LOST, OK)
        assert ids(await bench.take(subscription, 3)) == ["t2"]
        assert await subscription.redeliver(delivery, three) == (LOST, LOST)
        await bench.expect(done=2, in_flight=1)

    async def test_settling_nothing(self, bench: Bench) -> None:
        """Settling no deliveries returns no answers."""
        subscription = bench.subscribe()
        assert await subscription.ack() == await subscription.redeliver() == ()

    async def test_single_stale_receipt_raises(self, bench: Bench) -> None:
        """A delivery that was acked cannot be released: `LeaseLost` is raised (law 2)."""
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        await bench.stale(subscription.redeliver(delivery))
        await bench.stale(subscription.redeliver(delivery, lost=True))
        assert await bench.take(subscription) == [], "a settled task was delivered again (law 2)"
        await bench.expect(done=1)

    async def test_resent_ack(self, bench: Bench) -> None:
        """Sending the same ack again gets the same answer, and the ack counts once (law 2)."""
        subscription, delivery = await bench.running("t1")
        for _ in range(3):
            assert await subscription.ack(delivery) == (OK,)
        assert await subscription.ack(delivery, delivery) == (OK, OK)
        await bench.expect(done=1)

    async def test_resent_redeliver(self, bench: Bench) -> None:
        """Sending a release again makes no second copy, and leaves the task with its next consumer (law 2)."""
        subscription, delivery = await bench.running("t1")
        assert await subscription.redeliver(delivery, delivery) == (OK, OK)
        (again,) = await bench.take(subscription, 2)
        assert await subscription.redeliver(delivery) == (OK,)
        assert await bench.take(subscription) == [], "a resent release took the task away (law 2)"
        assert await subscription.ack(again) == (OK,)

    @needs(Capability.CONTROL)
    async def test_resent_after_the_end(self, bench: Bench) -> None:
        """After a cancel or an expiry, sending the last settlement again still gets the same answer (law 2)."""
        await bench.publish("cancelled")
        subscription = await bench.subscribed("expired", deadline=bench.now + bench.short)
        settled = await bench.take(subscription, 2)
        assert await subscription.redeliver(*settled, lost=True) == (OK, OK)
        running = await bench.take(subscription, 2)
        assert await bench.control.cancel(KEY, "cancelled")
        await bench.advance(bench.short)
        await bench.control.maintain()
        assert await subscription.redeliver(*settled, lost=True) == (OK, OK)
        assert await subscription.redeliver(*running, lost=True) == (LOST, LOST)
        await bench.expect(cancelled=1, expired=1)

    async def test_receipt_from_before_a_redelivery(self, bench: Bench) -> None:
        """After a release, the old receipt settles nothing (law 2; OPEN-A7, OPEN-C4)."""
        subscription, old = await bench.running("t1")
        await subscription.redeliver(old)
        await bench.stale(subscription.ack(old))
        new = await bench.one(subscription)
        await bench.stale(subscription.ack(old))
        assert await subscription.ack(old, new) == (LOST, OK)
        await bench.expect(done=1)

    async def test_receipt_from_before_a_close(self, bench: Bench) -> None:
        """Closing a subscription makes its receipts stale in every subscription (law 2; D5)."""
        await bench.publish("t1")
        closed, other = bench.subscribe(), bench.subscribe(consumer="another")
        old = await bench.one(closed)
        await closed.close()
        await bench.stale(other.ack(old))
        with pytest.raises((LeaseLost, SubscriptionClosed)):
            await closed.ack(old)
        assert ids(await bench.take(other, 2)) == ["t1"]

    async def test_receipt_never_issued(self, bench: Bench) -> None:
        """An invalid receipt settles nothing, and is refused like a stale receipt (law 2)."""
        subscription, delivery = await bench.running("t1")
        receipt = delivery.receipt
        for garbage in ("", "0", "0-0", receipt + "0", receipt[:-1], "x" * 500, "ä:{}*\0"):
            forged = msgspec.structs.replace(delivery, receipt=garbage)
            await bench.stale(subscription.ack(forged))
            await bench.stale(subscription.redeliver(forged))
        assert await subscription.ack(delivery) == (OK,)

    @needs(Capability.CONTROL)
    async def test_receipt_of_another_life(self, bench: Bench) -> None:
        """A receipt of a deleted task does not affect a later task with the same id (law 2)."""
        await bench.configure(dedupe_window=bench.short)
        subscription, old = await bench.running("t1")
        await subscription.ack(old)
        await bench.advance(bench.short * 1.5)
        await bench.publish("t1")
        new = await bench.one(subscription)
        await bench.stale(subscription.redeliver(old))
        assert await subscription.ack(new) == (OK,)
        await bench.expect(published=2, done=2)

    async def test_any_subscription_settles(self, bench: Bench) -> None:
        """A receipt can be settled through any open subscription of the backend."""
        await bench.publish("t1", "t2")
        subscription, other = bench.subscribe(), bench.subscribe("elsewhere", consumer="another")
        first, second = await bench.take(subscription, 2)
        assert await other.ack(first) == (OK,)
        assert await other.redeliver(second) == (OK,)
        assert ids(await bench.take(subscription, 2)) == ["t2"]
        await subscription.close()
        await bench.expect(done=1, waiting=1)
