"""The capability ``flow``: limits on the number of deliveries per interval."""

from __future__ import annotations

import asyncio

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import check_opening, check_rate, held
from taskqueue_core.backend import Capability
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.tasks import Delivery

_SLOW = RateLimit(max_tokens=3, interval=1, interval_unit=IntervalUnit.HOURS)
"""a rate limit whose next token comes after the end of every test"""
_TOKEN = 1200.0
"""seconds between two tokens of `_SLOW`"""
_FAST = RateLimit(max_tokens=4, interval=2)


class RateSuite(Harness, needs=(Capability.FLOW, Capability.CONTROL)):
    """Tests of ``rate_limit``."""

    async def test_burst(self, bench: Bench) -> None:
        """A full bucket may be used up at once; an empty answer then has the time of the next token (law 5; F3)."""
        await bench.limit(rate_limit=_SLOW)
        subscription = await bench.subscribed(*(f"t{n}" for n in range(9)))
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["t0", "t1", "t2"]
        for _ in range(3):
            check_opening(await held(subscription), taken[0].delivered_at + _TOKEN)
        await subscription.ack(*taken)
        check_opening(await held(subscription), taken[0].delivered_at + _TOKEN)

    async def test_refill(self, bench: Bench) -> None:
        """The bucket is refilled evenly over the interval, but never above its size (law 5; F3)."""
        await bench.limit(rate_limit=_FAST)
        subscription = await bench.subscribed(*(f"t{n}" for n in range(30)))
        taken = await bench.take(subscription, 9)
        assert len(taken) >= 4
        for seconds, tokens in ((1, 2), (2, 4), (3, 4), (0.5, 1)):
            await bench.advance(seconds)
            more = await bench.take(subscription, 9)
            assert len(more) >= tokens, (
                f"too few deliveries in {seconds} s: expected {tokens}, got {len(more)}"
            )
            taken += more
        check_rate(taken, _FAST)

    async def test_a_token_wakes(self, bench: Bench) -> None:
        """A receive that waits for a token returns when the token comes, and not before (law 5; F3)."""
        await bench.limit(rate_limit=_FAST)
        subscription = await bench.subscribed(*(f"t{n}" for n in range(7)))
        taken = await bench.take(subscription, 4)
        for _ in range(3):
            waiting = await bench.start(subscription.receive(9, None))
            await bench.advance(0.5)
            taken += (await bench.outcome(waiting)).deliveries
        assert ids(taken) == [f"t{n}" for n in range(7)]
        check_rate(taken, _FAST)

    async def test_every_waiting_receive_has_its_token(self, bench: Bench) -> None:
        """Waiting receives get one token each; a cancelled receive takes none (law 5; F5)."""
        await bench.limit(rate_limit=_FAST)
        await bench.publish(*(f"t{n}" for n in range(4)))
        taken = await bench.take(bench.subscribe(), 9)
        receives = [bench.subscribe(consumer=f"w{n}").receive(1, None) for n in range(4)]
        waiting = [await bench.start(receive) for receive in receives]
        await bench.publish(*(f"t{n}" for n in range(4, 7)))
        waiting.pop(0).cancel()
        for _ in range(3):
            await bench.advance(0.5)
        for waiter in waiting:
            taken += (await bench.outcome(waiter)).deliveries
        assert len(taken) == 7
        check_rate(taken, _FAST)

    async def test_work_that_comes_later(self, bench: Bench) -> None:
        """A waiting receive gets a task that is published later, as soon as there is a token for it (law 5; F3)."""
        await bench.limit(rate_limit=_FAST)
        subscription = await bench.subscribed(*(f"t{n}" for n in range(4)))
        taken = await bench.take(subscription, 4)
        assert (await held(subscription)).due_at is None, "due_at must be None: no task waits"
        waiting = await bench.start(subscription.receive(9, None))
        await bench.publish("late")
        await bench.advance(0.5)
        taken += (await bench.outcome(waiting)).deliveries
        assert ids(taken[4:]) == ["late"]
        check_rate(taken, _FAST)

    async def test_redeliveries_take_tokens(self, bench: Bench) -> None:
        """A redelivery takes a token, and does not change the attempt (laws 3, 5; F3)."""
        await bench.limit(rate_limit=_SLOW)
        subscription = await bench.subscribed("t1")
        taken = []
        for lost in (False, True, False):
            taken.append(await bench.one(subscription))
            await subscription.redeliver(taken[-1], lost=lost)
        check_opening(await held(subscription), taken[0].delivered_at + _TOKEN)
        assert [(item.attempt, item.losses) for item in taken] == [(1, 0), (1, 0), (1, 1)]

    async def test_expired_take_no_tokens(self, bench: Bench) -> None:
        """A task that expires instead of being delivered takes no token (laws 5, 8; F3)."""
        await bench.limit(rate_limit=_SLOW)
        await bench.publish(*(f"late{n}" for n in range(5)), deadline=bench.now + bench.short)
        await bench.advance(bench.short)
        subscription = bench.subscribe()
        assert await bench.take(subscription, 9) == []
        await bench.publish(*(f"t{n}" for n in range(5)))
        taken = [index for _ in range(5) for index in await bench.take(subscription, 9)]
        assert ids(taken) == ["t0", "t1", "t2"]

    async def test_shared_by_all(self, bench: Bench) -> None:
        """Concurrent receives together get exactly as many tasks as there are tokens (laws 5, 10; F5)."""
        await bench.limit(rate_limit=_SLOW)
        await bench.publish(*(f"t{n}" for n in range(9)))
        subscriptions = [bench.subscribe(consumer=f"w{n}") for n in range(5)]
        await asyncio.gather(*(subscription.receive(1, 0) for subscription in subscriptions))
        for subscription in subscriptions:
            await held(subscription)
        await bench.expect(in_flight=3, waiting=6)

    @needs("shared")
    async def test_tokens_on_every_replica(self, bench: Bench) -> None:
        """Replicas share the tokens of a queue (law 5; F5)."""
        other = await bench.replica()
        await bench.limit(rate_limit=_SLOW)
        await bench.publish(*(f"t{n}" for n in range(9)))
        here, there = bench.subscribe(), other.subscribe(consumer="another")
        taken = [await bench.one(subscription) for subscription in (here, there, here)]
        for subscription in (there, here):
            check_opening(await held(subscription), taken[0].delivered_at + _TOKEN)

    async def test_a_queue_without_tokens_holds_up_no_other(self, bench: Bench) -> None:
        """A queue without tokens does not delay a subscription's other queues (law 5; F3)."""
        await bench.limit(rate_limit=_SLOW)
        await bench.publish(*(f"t{n}" for n in range(9)))
        await bench.publish(*(f"o{n}" for n in range(9)), key=OTHER)
        subscription = bench.subscribe(KEY, OTHER)
        taken = ids(await bench.take(subscription, 20))
        assert sorted(taken) == sorted([*(f"o{n}" for n in range(9)), "t0", "t1", "t2"])
        late = bench.publish("late", key=OTHER)
        assert await bench.wakes(subscription.receive(5, None), late) == ["late"]

    async def test_earliest_date(self, bench: Bench) -> None:
        """An empty answer has the time of the next token or scheduled task, whichever is earlier (law 5)."""
        await bench.limit(rate_limit=_SLOW)
        await bench.publish(*(f"t{n}" for n in range(4)))
        subscription = bench.subscribe(KEY, OTHER)
        first, *_ = await bench.take(subscription, 9)
        await bench.publish("far", key=OTHER, not_before=first.delivered_at + 2 * _TOKEN)
        check_opening(await held(subscription), first.delivered_at + _TOKEN)
        await bench.publish("near", key=OTHER, not_before=first.delivered_at + _TOKEN / 2)
        check_opening(await held(subscription), first.delivered_at + _TOKEN / 2)

    async def test_with_a_limit_in_flight(self, bench: Bench) -> None:
        """``rate_limit`` and ``max_inflight`` apply together; a blocked task takes no token (law 5; F4)."""
        await bench.limit(rate_limit=_SLOW, max_inflight=1)
        subscription = await bench.subscribed(*(f"t{n}" for n in range(9)))
        taken: list[Delivery] = []
        for _ in range(3):
            for _ in range(3):
                taken += await bench.take(subscription, 9)
                assert (await held(subscription)).due_at is None, (
                    "due_at must be None: the time of the next delivery is unknown"
                )
            await subscription.ack(taken[-1])
        assert ids(taken) == ["t0", "t1", "t2"]
        check_opening(await held(subscription), taken[0].delivered_at + _TOKEN)

    async def test_removing_wakes(self, bench: Bench) -> None:
        """Removing the limit wakes a receive at once; a new limit starts with a full bucket (laws 5, 9; F7)."""
        await bench.limit(rate_limit=_SLOW)
        subscription = await bench.subscribed(*(f"t{n}" for n in range(9)))
        assert len(await bench.take(subscription, 9)) == 3
        lifting = bench.limit(rate_limit=None)
        assert await bench.wakes(subscription.receive(2, None), lifting) == ["t3", "t4"]
        await bench.limit(rate_limit=_SLOW)
        assert ids(await bench.take(subscription, 9)) == ["t5", "t6", "t7"]

    async def test_changed_limit_keeps_its_tokens(self, bench: Bench) -> None:
        """If the limit changes, tokens are kept, and the time of the next token changes at once (laws 5, 9; F7)."""
        await bench.limit(rate_limit=_SLOW)
        subscription = await bench.subscribed(*(f"t{n}" for n in range(9)))
        first, *_ = await bench.take(subscription, 9)
        await bench.limit(rate_limit=_SLOW.model_copy(update={"max_tokens": 6}))
        result = await held(subscription)
        assert result.due_at is not None
        assert result.due_at < first.delivered_at + _TOKEN, "the next token must come earlier"
        await bench.limit(rate_limit=None)
        await bench.limit(rate_limit=_SLOW)
        await bench.limit(rate_limit=_SLOW.model_copy(update={"max_tokens": 1}))
        assert ids(await bench.take(subscription, 9)) == ["t3"]

    @needs("durable")
    async def test_the_bucket_survives(self, bench: Bench) -> None:
        """After a restart, a durable queue has the same number of tokens (law 5; F3, GOAL-AB)."""
        await bench.limit(rate_limit=_SLOW)
        await bench.publish(*(f"t{n}" for n in range(9)))
        first, _ = await bench.take(bench.subscribe(), 2)
        heir = await bench.reopen()
        subscription = heir.subscribe()
        assert len(await heir.take(subscription, 9)) == 1
        check_opening(await held(subscription), first.delivered_at + _TOKEN)
