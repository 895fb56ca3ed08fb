"""The capability ``fair_order``: the tenants of a queue take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from pydantic import ValidationError

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import DEFAULT_PRIORITY, State

FAIR: dict[str, Any] = {
    "weights": {"a": 3},
    "tenant_capacity": 7,
    "tenant_max_inflight": 2,
    "tenant_rate_limit": RateLimit(max_tokens=5, interval=2),
}
"""settings that are valid only with the order ``fair``"""


class OrderSuite(Harness, needs=(Capability.FAIR_ORDER, Capability.CONTROL)):
    """Tests of ``order`` and ``weights``."""

    async def test_what_needs_fair_order(self, bench: Bench) -> None:
        """With fifo order, per-tenant settings are refused with an error that names the setting (B5)."""
        await bench.fair(**FAIR)
        for name, value in FAIR.items():
            with pytest.raises(ValidationError, match=f"{name} needs order 'fair'"):
                QueueSettings.model_validate({name: value})
        assert (await bench.control.settings(KEY)).order is Order.FAIR

    async def test_tenants_take_turns(self, bench: Bench) -> None:
        """Tenants take turns within one receive, however many tasks each tenant has (law 4; B2, OPEN-A1)."""
        await bench.fair()
        await fill(bench, a=4, b=2, c=3)
        taken = ids(await bench.take(bench.subscribe(), 9))
        assert taken == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "c2", "a3"]

    async def test_turns_go_on_over_receives(self, bench: Bench) -> None:
        """Tenants' turns continue across receives, whatever the consumer and the limit (law 4; B2, OPEN-B4)."""
        await bench.fair()
        await fill(bench, a=6, b=6, c=6)
        subscriptions = [bench.subscribe(consumer=f"w{n}") for n in range(3)]
        taken = await bench.drain(*subscriptions[:2], count=4)
        taken += await bench.drain(*subscriptions, count=8, limit=2)
        taken += await bench.drain(subscriptions[2], count=6, limit=5)
        assert taken == [f"{tenant}{n}" for n in range(6) for tenant in "abc"]

    @needs("shared")
    async def test_turns_go_on_over_replicas(self, bench: Bench) -> None:
        """The turns of tenants continue across replicas (laws 4, 9; OPEN-B4, B2)."""
        other = await bench.replica()
        await bench.fair()
        await fill(bench, a=4)
        await fill(other, b=4)
        here, there = bench.subscribe(), other.subscribe(consumer="another")
        taken = [
            (await index.one(subscription)).task.id
            for _ in range(4)
            for index, subscription in ((bench, here), (other, there))
        ]
        assert taken == [f"{tenant}{n}" for n in range(4) for tenant in "ab"]

    @needs("durable")
    async def test_turns_survive(self, bench: Bench) -> None:
        """After a restart, a durable queue continues with the tenant whose turn is next (law 4; OPEN-B1, GOAL-AB)."""
        await bench.fair()
        await fill(bench, a=3, b=3, c=3)
        await bench.drain(bench.subscribe(), count=4)
        heir = await bench.reopen()
        assert await heir.drain(heir.subscribe(), count=5) == ["b1", "c1", "a2", "b2", "c2"]

    async def test_tenant_joins_behind(self, bench: Bench) -> None:
        """A new tenant waits for one turn of each other tenant, not for all of their tasks (law 4; B2)."""
        await bench.fair()
        await fill(bench, a=9, b=9)
        subscription = bench.subscribe()
        assert await bench.drain(subscription, count=5) == ["a0", "b0", "a1", "b1", "a2"]
        await fill(bench, c=3)
        taken = await bench.drain(subscription, count=7)
        assert taken == ["b2", "a3", "c0", "b3", "a4", "c1", "b4"]

    async def test_tenant_saves_nothing(self, bench: Bench) -> None:
        """A tenant that had no waiting tasks for a while gets no extra turns later (law 4; B2)."""
        await bench.fair()
        await fill(bench, a=2, b=30)
        subscription = bench.subscribe()
        assert await bench.drain(subscription, count=20, limit=5)
        await fill(bench, a=5, start=2)
        taken = await bench.drain(subscription, count=8)
        assert taken == ["b18", "a2", "b19", "a3", "b20", "a4", "b21", "a5"]

    async def test_without_a_tenant(self, bench: Bench) -> None:
        """Tasks without a tenant are served like the tasks of one more tenant (law 4)."""
        await bench.fair()
        await bench.publish("n0", "n1", "n2", "n3")
        await fill(bench, a=2)
        taken = ids(await bench.take(bench.subscribe(), 9))
        assert taken == ["n0", "a0", "n1", "a1", "n2", "n3"]

    async def test_turns_of_each_queue(self, bench: Bench) -> None:
        """A tenant's turn in one queue does not affect its turns in another queue (law 4)."""
        await bench.fair()
        await bench.fair(OTHER)
        await fill(bench, a=3, b=3)
        await fill(bench, key=OTHER, b=2, a=2)
        taken = await bench.take(bench.subscribe(KEY, OTHER), 10)
        for key, order in ((KEY, "ababab"), (OTHER, "baba")):
            own = [d.task.tenant for d in taken if d.task.key == key]
            assert own == list(order), f"wrong order of tenants in {key} (law 4)"

    async def test_fifo_within_a_tenant(self, bench: Bench) -> None:
        """A tenant's tasks are delivered in the order in which they became available (laws 4, 8)."""
        await bench.fair()
        due = bench.now + bench.short
        await bench.publish("a1", not_before=due, tenant="a")
        await fill(bench, a=1, b=3)
        await bench.advance(bench.short)
        await bench.publish("a2", "a3", tenant="a")
        taken = ids(await bench.eventually(bench.subscribe(), 7))
        assert [name for name in taken if name[0] == "a"] == ["a0", "a1", "a2", "a3"]
        assert taken[:6:2] + taken[6:] == ["a0", "a1", "a2", "a3"]

    async def test_priorities_come_before_tenants(self, bench: Bench) -> None:
        """Tenants take turns separately in each priority, and higher priorities come first (law 4; FIX-C1)."""
        await bench.fair()
        await fill(bench, a=3, b=2)
        await bench.publish("B0", "B1", tenant="b", priority=8)
        await bench.publish("C0", "C1", tenant="c", priority=8)
        taken = ids(await bench.take(bench.subscribe(), 9))
        assert taken == ["B0", "C0", "B1", "C1", "a0", "b0", "a1", "b1", "a2"]

    async def test_returned_jumps_no_tenant(self, bench: Bench) -> None:
        """A released task is the next task of its tenant, but waits for the tenant's turn (laws 3, 4)."""
        for key, lost in ((KEY, False), (OTHER, True)):
            await bench.fair(key)
            await fill(bench, a=3, b=3, key=key)
            subscription = bench.subscribe(key)
            await subscription.redeliver(await bench.one(subscription), lost=lost)
            taken = await bench.take(subscription, 6)
            assert ids(taken) == ["b0", "a0", "b1", "a1", "b2", "a2"], (
                f"wrong order after a release with lost={lost} (law 4)"
            )
            assert taken[1].attempt == 1

    async def test_returned_task_of_who_had_left(self, bench: Bench) -> None:
        """If a tenant's only task is released, the tenant's turn comes after those of other tenants (laws 3, 4)."""
        await bench.fair()
        await fill(bench, a=1, b=4)
        subscription, two = bench.subscribe(), bench.subscribe()
        await bench.one(subscription)
        assert ids(await bench.take(two, 1)) == ["b0"]
        await subscription.close()
        assert ids(await bench.take(two, 4)) == ["b1", "a0", "b2", "b3"]

    async def test_weights(self, bench: Bench) -> None:
        """Deliveries are shared in proportion to the tenants' weights, and evenly spread (law 4; OPEN-B4)."""
        weights = {"a": 4, "b": 2}
        await bench.fair(weights=weights)
        await fill(bench, a=60, b=40, c=30)
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        taken = await bench.drain(subscription, two, count=70, limit=3)
        _check_shares(taken, {**weights, "c": 1})
        gaps = [index for index, name in enumerate(taken) if name[0] == "c"]
        assert max(b - a for a, b in pairwise(gaps)) <= 14

    async def test_changed_weights(self, bench: Bench) -> None:
        """Changed weights apply to the next delivery, even for tenants that are already waiting (laws 4, 9; F7)."""
        await bench.fair(weights={"a": 5})
        await fill(bench, a=60, b=60)
        subscription = bench.subscribe()
        _check_shares(await bench.drain(subscription, count=12, limit=5), {"a": 5, "b": 1})
        await bench.fair(weights={"b": 5})
        _check_shares(await bench.drain(subscription, count=24, limit=5), {"a": 1, "b": 5}, 6)
        await bench.fair(weights={})
        _check_shares(await bench.drain(subscription, count=20, limit=5), {"a": 1, "b": 1}, 6)

    async def test_flood_of_one_tenant(self, bench: Bench) -> None:
        """A tenant with five tasks is served in five rounds, however many tasks another tenant has (law 4; OPEN-A1)."""
        await bench.fair()
        for start in range(0, 2000, 500):
            await fill(bench, flood=500, start=start)
        small = [bench.task(f"s{n}-{m}", tenant=f"s{n}") for n in range(20) for m in range(5)]
        await bench.offer(*small)
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        taken = await bench.drain(subscription, two, count=126, limit=10)
        done = [name for name in taken if name.startswith("s")]
        assert len(done) == 100, (
            f"in 6 rounds of 21 tenants: expected all 100 tasks of the small tenants, got {len(done)} (law 4)"
        )
        assert [n for n in taken if n.startswith("s7-")] == [f"s7-{m}" for m in range(5)]

    async def test_equal_tenants_have_equal_shares(self, bench: Bench) -> None:
        """In every 50 deliveries, Jain's fairness index of ten tenants is 0.95 or more (law 4; OPEN-A1)."""
        await bench.fair()
        for n in range(10):
            names = [f"tenant{n}-{m}" for m in range(150 if n % 3 == 0 else 40)]
            await bench.publish(*names, tenant=f"tenant{n}")
        subscriptions = [bench.subscribe(consumer=f"w{n}") for n in range(4)]
        taken = await bench.drain(*subscriptions, count=300, limit=7)
        for start in range(0, 300, 50):
            shares = Counter(tenant_of(name) for name in taken[start : start + 50])
            index = 50**2 / (10 * sum(share**2 for share in shares.values()))
            assert index >= 0.95, (
                f"Jain's index: expected 0.95 or more, got {index:.2f}: {shares} (law 4)"
            )

    @needs(Capability.FLOW)
    async def test_cancelled_leave_at_once(self, bench: Bench) -> None:
        """A cancelled task uses neither a turn nor capacity (laws 4, 6; B3)."""
        await bench.fair()
        await bench.limit(capacity=9)
        await fill(bench, a=3, b=3, c=3)
        subscription = bench.subscribe()
        assert ids(await bench.take(subscription, 1)) == ["a0"]
        for name in ("b0", "b1", "b2", "c1"):
            assert await bench.control.cancel(KEY, name)
        await fill(bench, d=5)
        taken = ids(await bench.take(subscription, 9))
        assert sorted(taken) == ["a1", "a2", "c0", "c2", "d0", "d1", "d2", "d3", "d4"]
        assert taken[:3] == ["c0", "a1", "d0"]

    @needs(Capability.FLOW)
    async def test_expired_leave(self, bench: Bench) -> None:
        """An expired task uses no turn, and no capacity once a receive has found it (laws 4, 8; B3)."""
        await bench.fair()
        await bench.limit(capacity=6)
        await fill(bench, a=2)
        await fill(bench, b=2, deadline=bench.now + bench.short)
        await fill(bench, b=1, c=1, start=2)
        await bench.advance(bench.short)
        subscription = bench.subscribe()
        taken = await bench.eventually(subscription, 4)
        assert ids(taken) == ["a0", "b2", "c2", "a1"]
        assert await bench.state("b0") is State.EXPIRED
        await fill(bench, d=6)


async def fill(
    bench: Bench,
    *,
    start: int = 0,
    key: str = KEY,
    deadline: float | None = None,
    priority: int = DEFAULT_PRIORITY,
    **tenants: int,
) -> None:
    """Publish the given number of tasks for each tenant: ``a=2`` publishes ``a0`` and ``a1`` for the tenant ``a``."""
    for tenant, count in tenants.items():
        names = [f"{tenant}{n}" for n in range(start, start + count)]
        fields: dict[str, Any] = {"key": key, "deadline": deadline, "priority": priority}
        await bench.publish(*names, tenant=tenant, **fields)


def tenant_of(name: str) -> str:
    """Return the tenant of a task that `fill` published."""
    return name.rstrip("0123456789")


def _check_shares(taken: Sequence[str], weights: dict[str, int], slack: int = 0) -> None:
    """Fail unless each tenant has had its weighted share at every moment, within about one round plus ``slack``."""
    names: Iterable[str] = map(tenant_of, taken)
    counts, whole = Counter[str](), sum(weights.values())
    for total, name in enumerate(names, 1):
        counts[name] += 1
        for tenant, weight in weights.items():
            share = total * weight / whole
            assert abs(counts[tenant] - share) <= weight + 1 + slack, (
                f"wrong share of tenant {tenant!r}: expected {share:.1f} of {total}, got {counts[tenant]} (law 4)"
            )
