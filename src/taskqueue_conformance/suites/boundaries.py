"""Times to the millisecond: what happens just before a promised time, and at that time."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import Need, needs
from taskqueue_core.backend import Capability
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.tasks import Published

_NEEDS: tuple[Need, ...] = ("manual_clock",)
_TICK = 2**-10
"""nearly a millisecond; sums of such times have no rounding errors"""
_WAIT = 4.0
"""seconds until the time that a test checks"""


class BoundariesSuite(Harness, needs=_NEEDS):
    """Tests of the millisecond before a promised time."""

    async def test_scheduled_not_a_millisecond_early(self, bench: Bench) -> None:
        """A scheduled task is not delivered a millisecond before its time, and is delivered at that time (law 8)."""
        at = bench.now + _WAIT
        await bench.publish("t1", not_before=at)
        await _delivered_at(bench, at, "t1")

    async def test_retry_not_a_millisecond_early(self, bench: Bench) -> None:
        """A retry is not delivered a millisecond before its time, and is delivered at that time (law 8)."""
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        at = bench.now + _WAIT
        await bench.retry(delivery.task, _WAIT)
        await subscription.close()
        await _delivered_at(bench, at, "t1")

    async def test_waiting_receive_not_a_millisecond_early(self, bench: Bench) -> None:
        """A waiting receive gets a scheduled task at its time, and not a millisecond before (law 8)."""
        await bench.publish("t1", not_before=bench.now + _WAIT)
        waiting = await bench.start(bench.subscribe().receive(1, None))
        await bench.advance(_WAIT - _TICK)
        await bench.hop(20)
        assert not waiting.done() or not waiting.result().deliveries, (
            "delivered a millisecond before its time (law 8)"
        )
        await bench.advance(_TICK)
        assert ids((await bench.outcome(waiting)).deliveries) == ["t1"]

    @needs(Capability.CONTROL)
    async def test_maintenance_not_a_millisecond_early(self, bench: Bench) -> None:
        """Maintenance neither makes a task available nor ends it a millisecond before its time (law 8)."""
        at = bench.now + _WAIT
        await bench.publish("due", not_before=at)
        await bench.publish("late", deadline=at)
        await bench.advance(_WAIT - _TICK)
        done = await bench.control.maintain()
        assert (done.promoted, done.expired) == (0, ()), "too early by a millisecond (law 8)"
        await bench.expect(scheduled=1, waiting=1)

    async def test_deadline_to_the_millisecond(self, bench: Bench) -> None:
        """A task is delivered a millisecond before its deadline, and not at its deadline (law 8)."""
        at = bench.now + _WAIT
        subscription = await bench.subscribed("t1", "t2", deadline=at)
        await bench.advance(_WAIT - _TICK)
        assert ids([await bench.one(subscription)]) == ["t1"]
        await bench.advance(_TICK)
        assert await bench.take(subscription) == [], "delivered at its deadline (law 8)"

    @needs(Capability.CONTROL)
    async def test_window_to_the_millisecond(self, bench: Bench) -> None:
        """The id of an ended task is known for ``dedupe_window``, and after that it can be published again (law 7)."""
        await bench.configure(dedupe_window=_WAIT)
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        await bench.advance(_WAIT - _TICK)
        await bench.control.maintain()
        assert await bench.statuses("t1") == [Published.DUPLICATE]
        await bench.advance(_TICK)
        assert await bench.statuses("t1") == [Published.ACCEPTED]

    @needs(Capability.CONTROL)
    async def test_result_to_the_millisecond(self, bench: Bench) -> None:
        """A result is kept until ``result_ttl`` after the ack, and not longer."""
        await bench.configure(result_ttl=_WAIT)
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery, results=[b"1"])
        await bench.advance(_WAIT - _TICK)
        await bench.control.maintain()
        assert await bench.control.results(KEY, "t1") == (b"1",)
        await bench.advance(_TICK)
        assert await bench.control.results(KEY, "t1") == (None,)

    @needs(Capability.CONTROL, Capability.FLOW)
    async def test_processing_time_to_the_millisecond(self, bench: Bench) -> None:
        """A delivery counts as lost at ``max_processing_time``, and not a millisecond before (laws 2, 3)."""
        await bench.limit(max_processing_time=_WAIT)
        await bench.running("t1")
        await bench.advance(_WAIT - _TICK)
        assert (await bench.control.maintain()).recovered == 0, "lost a millisecond early (law 3)"
        await bench.advance(_TICK)
        assert (await bench.control.maintain()).recovered == 1

    @needs(Capability.CONTROL, Capability.FLOW)
    async def test_token_to_the_millisecond(self, bench: Bench) -> None:
        """A rate limit allows the next delivery when a token is available, and not a millisecond before (law 5)."""
        limit = RateLimit(max_tokens=1, interval=int(_WAIT), interval_unit=IntervalUnit.SECONDS)
        await bench.limit(rate_limit=limit)
        subscription = await bench.subscribed("t1", "t2")
        assert ids(await bench.take(subscription, 2)) == ["t1"]
        await bench.advance(_WAIT - _TICK)
        assert await bench.take(subscription) == [], (
            "a token was available a millisecond early (law 5)"
        )
        await bench.advance(_TICK)
        assert ids(await bench.take(subscription)) == ["t2"]


async def _delivered_at(bench: Bench, at: float, task_id: str) -> None:
    subscription = bench.subscribe()
    await bench.advance(at - bench.now - _TICK)
    assert await bench.take(subscription) == [], "delivered a millisecond before its time (law 8)"
    await bench.advance(_TICK)
    delivery = await bench.one(subscription)
    assert delivery.task.id == task_id
    assert delivery.delivered_at >= at, f"delivered at {delivery.delivered_at}, before {at} (law 8)"
