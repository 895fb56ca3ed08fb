"""The capability ``revocation``: a subscription learns at once when one of its deliveries has ended."""

from __future__ import annotations

import asyncio

from taskqueue_conformance.bench import KEY, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability


class RevocationSuite(Harness, needs=(Capability.REVOCATION,)):
    """Tests of `Revocation.revoked`."""

    @needs(Capability.CONTROL)
    async def test_cancelled_is_revoked(self, bench: Bench) -> None:
        """A waiting call of ``revoked`` returns the receipt of a running task when the task is cancelled."""
        subscription, delivery = await bench.running("t1")
        waiting = await bench.start(bench.revoked(subscription))
        await bench.control.cancel(KEY, "t1")
        assert await bench.outcome(waiting) == (delivery.receipt,)

    @needs(Capability.CONTROL)
    async def test_nothing_is_missed(self, bench: Bench) -> None:
        """Receipts that are revoked while no call waits are returned by the next call, each receipt once."""
        subscription = await bench.subscribed("t1", "t2", "t3")
        receipts = [delivery.receipt for delivery in await bench.take(subscription, 3)]
        await bench.control.cancel(KEY, "t1")
        await bench.control.cancel(KEY, "t3")
        results: list[str] = []
        while len(results) < 2:
            results += await bench.outcome(await bench.start(bench.revoked(subscription)))
        assert sorted(results) == sorted((receipts[0], receipts[2]))
        again = await bench.start(bench.revoked(subscription))
        assert not again.done(), "reported as revoked twice"

    @needs(Capability.CONTROL)
    async def test_expiry(self, bench: Bench) -> None:
        """The receipt of a running task is revoked when the task expires (law 8)."""
        subscription, delivery = await bench.running("t1", deadline=bench.now + bench.short)
        waiting = await bench.start(bench.revoked(subscription))
        await bench.advance(bench.short)
        await bench.control.maintain()
        assert await bench.outcome(waiting) == (delivery.receipt,)

    @needs("atomic_retry")
    async def test_retried_by_others(self, bench: Bench) -> None:
        """The receipt of a running task is revoked when another client schedules its retry (law 2)."""
        subscription, delivery = await bench.running("t1")
        waiting = await bench.start(bench.revoked(subscription))
        await bench.retry(delivery.task, 3600)
        assert await bench.outcome(waiting) == (delivery.receipt,)

    @needs(Capability.CONTROL)
    async def test_own_settlements_are_no_news(self, bench: Bench) -> None:
        """Receipts that the subscription settled, or never had, are not reported as revoked."""
        await bench.publish("t1", "t2", "t3")
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        first, second = await bench.take(subscription, 2)
        third = await bench.one(two)
        await subscription.ack(first)
        await subscription.redeliver(second)
        await bench.control.cancel(KEY, "t3")
        waiting = await bench.start(bench.revoked(subscription))
        assert not waiting.done(), f"a receipt was reported as revoked: {waiting.result()}"
        other = await bench.start(bench.revoked(two))
        assert await bench.outcome(other) == (third.receipt,)

    @needs(Capability.HANDOVER, Capability.CONTROL)
    async def test_adopted_is_not_revoked(self, bench: Bench) -> None:
        """An adopted receipt is not reported as revoked; its end is reported to the new subscription."""
        old, delivery = await bench.running("t1")
        new = bench.subscribe()
        before, after = await bench.start(bench.revoked(old)), await bench.start(bench.revoked(new))
        await bench.adopt(new, delivery.receipt)
        await bench.hop(20)
        assert not before.done(), "an adopted receipt was reported as revoked"
        await bench.control.cancel(KEY, "t1")
        assert await bench.outcome(after) == (delivery.receipt,)

    async def test_close_ends_the_wait(self, bench: Bench) -> None:
        """Once the subscription is closed, waiting and later calls return an empty tuple."""
        subscription = bench.subscribe()
        waiting = await bench.start(bench.revoked(subscription))
        await subscription.close()
        assert await bench.outcome(waiting) == ()
        assert await asyncio.wait_for(bench.revoked(subscription), 5) == ()
