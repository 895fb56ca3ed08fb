"""The capability ``fair_order``: limits on a tenant's waiting tasks, tasks in flight and deliveries, and its pause."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import (
    ack,
    cancel,
    check_opening,
    check_rate,
    check_refused,
    close,
    frees,
    held,
    lose,
    redeliver,
)
from taskqueue_conformance.suites.order import fill
from taskqueue_core.backend import Capability
from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.tasks import Confirmation, Published, Refusal, Settled

_SLOW = RateLimit(max_tokens=2, interval=1, interval_unit=IntervalUnit.HOURS)
"""a rate limit whose next token comes after the end of every test"""
_TOKEN = 1800.0
"""seconds between two tokens of `_SLOW`"""
_FAST = RateLimit(max_tokens=2, interval=1)


class TenantsSuite(Harness, needs=(Capability.FAIR_ORDER, Capability.CONTROL)):
    """Tests of ``tenant_capacity``, ``tenant_max_inflight``, ``tenant_rate_limit`` and ``paused_tenants``."""

    async def test_tenant_is_refused(self, bench: Bench) -> None:
        """Tasks of a tenant at its capacity are refused; other tenants' tasks are accepted (law 6; B5, OPEN-F1)."""
        await bench.fair(tenant_capacity=2)
        await fill(bench, a=2, b=1)
        answers = await _publish(bench, "a2", "b1", "a3", "b2", "c0")
        full = Refusal.TENANT_FULL
        assert [answer.code for answer in answers] == [full, None, full, full, None]
        for answer in (answers[0], answers[2], answers[3]):
            check_refused(answer, full, depth=2)
        await bench.expect(waiting=5)
        await bench.publish("n0", "n1")
        (answer,) = await bench.offer("n2")
        assert answer.code is full, "tasks without a tenant must count as one tenant (law 6)"

    @needs(Capability.FLOW)
    async def test_total_bounds_tenants(self, bench: Bench) -> None:
        """The capacity of a queue applies to all its tenants together (law 6; OPEN-B2)."""
        await bench.fair(tenant_capacity=2, capacity=5)
        await fill(bench, a=2, b=2)
        answers = await _publish(bench, "a2", "c0", "d0", "b2")
        full, code = Refusal.QUEUE_FULL, [answer.code for answer in answers]
        assert code == [Refusal.TENANT_FULL, None, full, full], (
            "if both the queue and the tenant are full, the code must be queue_full (law 6)"
        )
        assert [answer.depth for answer in answers] == [2, None, 5, 5]
        await bench.expect(waiting=5)

    async def test_known_ids_of_a_full_tenant(self, bench: Bench) -> None:
        """Known ids of a tenant at its capacity are still duplicates or conflicts (laws 6, 7)."""
        await bench.fair(tenant_capacity=1)
        await fill(bench, a=1)
        tasks = [bench.task("a0", tenant="a"), bench.task("a0", tenant="a", payload="other")]
        assert await bench.statuses(*tasks) == [Published.DUPLICATE, Published.CONFLICT]

    async def test_tenant_has_room_again(self, bench: Bench) -> None:
        """A delivery, a cancel or an expiry frees capacity of the tenant; a retry needs no capacity (law 6; B3)."""
        await bench.fair(tenant_capacity=2)
        await fill(bench, a=1, b=2)
        await fill(bench, a=1, start=1, deadline=bench.now + bench.short)
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        assert delivery.task.id == "a0"
        await _has_room(bench, "a", ["a2"])
        assert await bench.control.cancel(KEY, "b0")
        await _has_room(bench, "b", ["b2"])
        await bench.advance(bench.short)
        await bench.control.maintain()
        await _has_room(bench, "a", ["a3"])
        await subscription.redeliver(delivery)
        await _has_room(bench, "a", [])
        retried = await bench.retry(bench.task("a99", tenant="a"))
        assert retried is Published.ACCEPTED, "a retry was refused (law 6)"
        assert await bench.control.cancel(KEY, "a2")
        await _has_room(bench, "a", ["a4"])
        await bench.control.purge(KEY)
        await _has_room(bench, "a", ["a5", "a6"])
        await _has_room(bench, "b", ["b5", "b6"])

    async def test_tenants_places(self, bench: Bench) -> None:
        """A tenant with as many tasks in flight as allowed is skipped (laws 4, 5; OPEN-F1)."""
        await bench.fair(tenant_max_inflight=2)
        await fill(bench, a=5, b=3, c=1)
        item, two = bench.subscribe(), bench.subscribe(consumer="another")
        taken = await bench.take(item, 3)
        taken += await bench.take(two, 9)
        assert ids(taken) == ["a0", "b0", "c0", "a1", "b1"]
        for subscription in (item, two):
            assert (await held(subscription)).due_at is None, (
                "due_at must be None: the time of the next delivery is unknown"
            )
        await two.ack(taken[0])
        assert ids(await bench.take(item, 9)) == ["a2"]
        await fill(bench, d=3)
        assert ids(await bench.take(item, 9)) == ["d0", "d1"]

    async def test_tenants_places_side_by_side(self, bench: Bench) -> None:
        """Concurrent receives deliver exactly as many tasks of a tenant as its limit allows (laws 5, 10; OPEN-F1)."""
        await bench.fair(tenant_max_inflight=3)
        await fill(bench, a=20, b=20, c=2)
        subscriptions = [bench.subscribe(consumer=f"w{n}") for n in range(10)]
        batches = await asyncio.gather(*(one.receive(2, 0) for one in subscriptions))
        counts = Counter(d.task.tenant for received in batches for d in received.deliveries)
        assert counts == {"a": 3, "b": 3, "c": 2}

    async def test_a_tenants_place_wakes(self, bench: Bench) -> None:
        """Every end of a delivery wakes a receive that ``tenant_max_inflight`` blocks (law 5)."""
        await bench.fair(tenant_max_inflight=1)
        for end in (ack, redeliver, lose, cancel, close):
            await frees(bench, end, tenant="a")

    async def test_tenants_tokens(self, bench: Bench) -> None:
        """A tenant without tokens is skipped; redeliveries also take tokens (law 5; OPEN-F1, F3)."""
        await bench.fair(tenant_rate_limit=_SLOW)
        await fill(bench, a=5, b=1)
        subscription = bench.subscribe()
        first = await bench.one(subscription)
        await subscription.redeliver(first)
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["b0", "a0"]
        check_opening(await held(subscription), first.delivered_at + _TOKEN)
        await fill(bench, b=2, c=3, start=1)
        assert sorted(ids(await bench.take(subscription, 9))) == ["b1", "c1", "c2"]

    async def test_a_tenants_token_wakes(self, bench: Bench) -> None:
        """A receive that waits for a tenant's token returns when the token comes (law 5; OPEN-F1, F3)."""
        await bench.fair(tenant_rate_limit=_FAST)
        await fill(bench, a=6)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["a0", "a1"]
        for number in range(2, 5):
            waiting = await bench.start(subscription.receive(9, None))
            if self.manual_clock:
                await bench.advance(0.49)
                await bench.hop(20)
                assert not waiting.done(), "delivered without a token (law 5)"
                await bench.advance(0.01)
            else:
                await bench.advance(0.5)
            deliveries = (await bench.outcome(waiting)).deliveries
            assert ids(deliveries) == [f"a{number}"]
            taken += deliveries
        check_rate(taken, _FAST)

    async def test_others_wake_meanwhile(self, bench: Bench) -> None:
        """A receive that waits for a tenant's token wakes for another tenant's task (laws 4, 5)."""
        await bench.fair(tenant_rate_limit=_SLOW, tenant_max_inflight=3)
        await fill(bench, a=5)
        subscription = bench.subscribe()
        assert len(await bench.take(subscription, 9)) == 2
        assert await bench.wakes(subscription.receive(9, None), fill(bench, b=1)) == ["b0"]

    @needs(Capability.FLOW)
    async def test_limits_of_tenants_and_queue(self, bench: Bench) -> None:
        """Limits of the queue and of each tenant apply together (law 5; OPEN-F1, F5)."""
        limit = RateLimit(max_tokens=6, interval=1, interval_unit=IntervalUnit.HOURS)
        await bench.fair(
            max_inflight=4, rate_limit=limit, tenant_max_inflight=2, tenant_rate_limit=_SLOW
        )
        await fill(bench, a=9, b=9, c=9, d=9)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["a0", "b0", "c0", "d0"], "four tasks may be in flight (law 5)"
        await subscription.ack(*taken[:2])
        more = await bench.take(subscription, 9)
        assert len(more) == 2, "the queue has six tokens (law 5)"
        await subscription.ack(*taken[2:], *more)
        assert (await held(subscription)).due_at is not None
        await bench.limit(rate_limit=None)
        more += await bench.take(subscription, 9)
        counts = Counter(delivery.task.tenant for delivery in (*taken, *more))
        assert counts == {"a": 2, "b": 2, "c": 2, "d": 2}, "each tenant has two tokens (law 5)"

    @needs(Capability.FLOW)
    async def test_pause_of_a_fair_queue(self, bench: Bench) -> None:
        """A pause stops the deliveries of all tenants' tasks, and no tenant loses its turn (laws 4, 5; F6)."""
        await bench.fair()
        await fill(bench, a=3, b=2)
        subscription = bench.subscribe()
        assert await bench.drain(subscription, count=1) == ["a0"]
        await bench.limit(paused=True)
        await held(subscription)
        await bench.limit(paused=False)
        assert await bench.drain(subscription, count=4) == ["b0", "a1", "b1", "a2"]

    async def test_tenant_limits_change(self, bench: Bench) -> None:
        """A raised tenant limit wakes a waiting receive; a lowered limit ends no delivery (laws 5, 9; F7)."""
        await bench.fair(tenant_max_inflight=1)
        await fill(bench, a=6)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["a0"]
        for limit, matches in ((3, ["a1", "a2"]), (None, ["a3", "a4"])):
            waiting = await bench.start(subscription.receive(2, None))
            await bench.fair(tenant_max_inflight=limit)
            deliveries = (await bench.outcome(waiting)).deliveries
            deliveries += tuple(await bench.take(subscription, 2 - len(deliveries)))
            assert ids(deliveries) == matches
            taken += deliveries
        await bench.fair(tenant_max_inflight=1)
        for delivery in taken:
            await held(subscription)
            assert await subscription.ack(delivery) == (Settled.OK,)
        assert ids(await bench.take(subscription, 9)) == ["a5"]

    async def test_changed_tokens_of_tenants(self, bench: Bench) -> None:
        """A new, changed or removed rate limit of tenants applies to the next receive (laws 5, 9; F7)."""
        await bench.fair()
        await fill(bench, a=9, b=1)
        subscription = bench.subscribe()
        assert len(await bench.take(subscription, 2)) == 2
        await bench.fair(tenant_rate_limit=_SLOW)
        assert ids(await bench.take(subscription, 9)) == ["a1", "a2"], (
            "expected a full bucket (law 5)"
        )
        waiting = await bench.start(subscription.receive(9, None))
        assert not waiting.done(), "delivered without a token (law 5)"
        await bench.fair(tenant_rate_limit=None)
        assert len((await bench.outcome(waiting)).deliveries) == 6

    async def test_what_tenants_have_saved(self, bench: Bench) -> None:
        """When its rate limit changes, a tenant keeps its tokens, up to the new bucket's size (law 5; F7)."""
        await fill(bench, a=30)
        subscription = bench.subscribe()
        changes = (((40, 40), 2), ((4, 4), 2), ((1, 40), 1), (None, 9))
        for rate, saved in changes if self.manual_clock else changes[:1]:
            await bench.fair(tenant_rate_limit=RateLimit(max_tokens=4, interval=2))
            await bench.advance(2.5)
            assert len(await bench.take(subscription, 9)) == 4, "expected a full bucket (law 5)"
            await bench.advance(1)
            limit = rate and RateLimit(max_tokens=rate[0], interval=rate[1])
            await bench.fair(tenant_rate_limit=limit)
            assert len(await bench.take(subscription, 9)) == saved, (
                f"wrong number of tokens after a change to {limit} (law 5)"
            )

    async def test_paused_tenant(self, bench: Bench) -> None:
        """Nothing of a paused tenant is delivered, whatever becomes available; it keeps its order (law 5)."""
        await bench.fair(weights={"a": 2})
        await fill(bench, a=5, b=3)
        subscription = bench.subscribe()
        running, _, _ = await bench.take(subscription, 3)
        assert ids([running]) == ["a0"]
        await bench.fair(paused_tenants=("a", "new"))
        await subscription.redeliver(running)
        await bench.publish("a9", tenant="a", not_before=bench.now + bench.short)
        await _publish(bench, "n0")
        await fill(bench, new=1)
        await bench.advance(bench.short)
        assert sorted(ids(await bench.take(subscription, 9))) == ["b1", "b2", "n0"], (
            "expected all tasks of the other tenants, and none of a paused one (law 5)"
        )
        await bench.expect(waiting=6, in_flight=5)
        waiting = subscription.receive(1, None)
        resumed = bench.fair(paused_tenants=("new",))
        assert await bench.wakes(waiting, resumed) == ["a0"], "a resume must wake a receive (law 9)"
        assert ids(await bench.take(subscription, 9)) == ["a2", "a3", "a4", "a9"]
        await bench.fair(paused_tenants=())
        assert ids(await bench.take(subscription, 9)) == ["new0"]

    async def test_paused_tenant_at_a_limit(self, bench: Bench) -> None:
        """A paused tenant that was at its limit stays paused when a task ends, and has its limit after (law 5)."""
        await bench.fair(tenant_max_inflight=1)
        await fill(bench, a=3, b=1)
        subscription = bench.subscribe()
        first, _ = await bench.take(subscription, 9)
        await bench.fair(paused_tenants=("a",))
        await subscription.ack(first)
        assert ids(await bench.take(subscription, 9)) == []
        await bench.fair(paused_tenants=())
        assert ids(await bench.take(subscription, 9)) == ["a1"]

    async def test_limits_of_each_queue(self, bench: Bench) -> None:
        """A tenant that has reached its limit in one queue is still served in another queue (law 5)."""
        await bench.fair(tenant_max_inflight=1)
        await fill(bench, a=2)
        await fill(bench, a=2, key=OTHER)
        subscription = bench.subscribe(KEY, OTHER)
        taken = await bench.take(subscription, 9)
        names = sorted((d.task.key, d.task.id) for d in taken)
        assert names == [(KEY, "a0"), (OTHER, "a0"), (OTHER, "a1")]

    @needs("shared")
    async def test_tenants_over_replicas(self, bench: Bench) -> None:
        """Replicas share the count of a tenant's tasks in flight, and wake each other's receives (laws 5, 9)."""
        other = await bench.replica()
        await other.fair(tenant_max_inflight=1)
        await fill(bench, a=2, b=1)
        here, there = bench.subscribe(), other.subscribe(consumer="another")
        delivery = await bench.one(here)
        assert ids(await other.take(there, 9)) == ["b0"]
        assert await other.wakes(there.receive(1, None), here.ack(delivery)) == ["a1"]


async def _publish(bench: Bench, *names: str) -> tuple[Confirmation, ...]:
    """Publish tasks; the first letter of a task's id is its tenant."""
    return await bench.offer(*(bench.task(name, tenant=name[0]) for name in names))


async def _has_room(bench: Bench, tenant: str, names: Sequence[str]) -> None:
    """Fail unless the tenant's tasks ``names`` are accepted, and one more task is refused."""
    bench.numbers += 1
    *accepted, refused = await _publish(bench, *names, f"{tenant}-more{bench.numbers}")
    statuses = [answer.status for answer in accepted]
    assert statuses == [Published.ACCEPTED] * len(names), (
        f"tenant {tenant!r} must have capacity (law 6)"
    )
    assert refused.code is Refusal.TENANT_FULL, (
        f"tenant {tenant!r} must have no capacity left (law 6)"
    )
