"""The capability ``fair_order``: changing the order while there are tasks in every state."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.order import fill, tenant_of
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Order
from taskqueue_core.tasks import Published, Refusal


class SwapSuite(Harness, needs=(Capability.FAIR_ORDER, Capability.CONTROL)):
    """Tests of changes of ``order``."""

    async def test_to_fair(self, bench: Bench) -> None:
        """After a change to fair order, the tenants of waiting tasks take turns at once (laws 4, 9; B12)."""
        await fill(bench, a=4, b=2, c=3)
        subscription = bench.subscribe()
        assert await bench.drain(subscription, count=1) == ["a0"]
        await bench.fair()
        taken = await bench.drain(subscription, count=8, limit=3)
        _check_rounds(taken, Counter(a=3, b=2, c=3))
        await bench.expect(done=9)

    async def test_to_fifo(self, bench: Bench) -> None:
        """After a change to fifo order, the task that became available first is next (laws 4, 9; B12)."""
        await bench.fair()
        await fill(bench, a=3, b=2)
        await fill(bench, a=1, c=2, start=3)
        subscription = bench.subscribe()
        assert await bench.drain(subscription, count=3) == ["a0", "b0", "c3"]
        await bench.arrange(order=Order.FIFO)
        taken = await bench.drain(subscription, count=5, limit=2)
        assert taken == ["a1", "a2", "b1", "a3", "c4"]
        await bench.expect(done=8)

    async def test_returned_and_swapped(self, bench: Bench) -> None:
        """A released task still comes before other tasks after the order has changed (laws 3, 4)."""
        await bench.fair()
        await fill(bench, a=3, b=3)
        subscription = bench.subscribe()
        first, second, third = await bench.take(subscription, 3)
        assert ids([first, second, third]) == ["a0", "b0", "a1"]
        await subscription.redeliver(third, first)
        await bench.arrange(order=Order.FIFO)
        assert ids(await bench.take(subscription, 1)) == ["a0"]
        await subscription.redeliver(second)
        taken = await bench.take(subscription, 3)
        assert ids(taken) == ["a1", "b0", "a2"]
        assert [delivery.attempt for delivery in taken] == [1, 1, 1]
        await subscription.redeliver(*taken)
        await bench.fair()
        taken = await bench.take(subscription, 9)
        _check_rounds(ids(taken), Counter(a=2, b=3))
        assert [name for name in ids(taken) if name[0] == "a"] == ["a1", "a2"]
        assert [name for name in ids(taken) if name[0] == "b"] == ["b0", "b1", "b2"]

    @needs("atomic_retry")
    async def test_scheduled_and_swapped(self, bench: Bench) -> None:
        """A scheduled task or retry is subject to the order that applies when it becomes due (laws 4, 8; B12)."""
        await bench.publish("a8", "a9", tenant="a", not_before=bench.now + bench.short)
        await fill(bench, a=1)
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        await bench.retry(delivery.task, bench.short, settles=delivery)
        await bench.fair()
        await fill(bench, b=3)
        await bench.advance(1.5 * bench.short)
        taken = await bench.eventually(subscription, 6)
        assert [d.task.tenant for d in taken] == ["b", "a", "b", "a", "b", "a"]
        assert [d.task.id for d in taken if d.task.tenant == "a"] == ["a8", "a9", "a0"]

    async def test_in_flight_and_swapped(self, bench: Bench) -> None:
        """A delivery made under the previous order can be settled or lost as usual (laws 1, 2, 3; B12)."""
        await bench.fair()
        await fill(bench, a=3, b=3)
        subscription = bench.subscribe()
        taken = {delivery.task.id: delivery for delivery in await bench.take(subscription, 6)}
        await bench.arrange(order=Order.FIFO)
        await subscription.ack(taken["a0"])
        await subscription.redeliver(taken["b0"], lost=True)
        await bench.fair()
        await subscription.ack(taken["b1"])
        await subscription.redeliver(taken["a1"])
        await bench.control.cancel(KEY, "a2")
        await subscription.close()
        await bench.expect(done=2, cancelled=1, waiting=3)
        again = await bench.take(bench.subscribe(), 9)
        assert sorted(ids(again)) == ["a1", "b0", "b2"]
        counted = {d.task.id: (d.attempt, d.losses) for d in again}
        assert counted == {"a1": (1, 0), "b0": (1, 1), "b2": (1, 0)}

    async def test_a_swap_refuses_nothing(self, bench: Bench) -> None:
        """If a new order limits tenants, waiting tasks are kept; full tenants accept no more (law 6; OPEN-B3, B12)."""
        await fill(bench, a=6, b=2)
        await bench.fair(tenant_capacity=3)
        await bench.expect(waiting=8)
        fresh = [bench.task(f"{tenant}7", tenant=tenant) for tenant in "ab"]
        answers = await bench.offer(*fresh)
        assert [answer.code for answer in answers] == [Refusal.TENANT_FULL, None]
        assert [answer.depth for answer in answers] == [6, None]
        await bench.arrange(order=Order.FIFO, tenant_capacity=None)
        assert await bench.statuses(fresh[0]) == [Published.ACCEPTED]
        taken = await bench.drain(bench.subscribe(), count=10)
        assert taken == [*(f"a{n}" for n in range(6)), "b0", "b1", "b7", "a7"]

    async def test_swap_wakes(self, bench: Bench) -> None:
        """A receive that a tenant's limit blocks wakes when a new order removes the limit (laws 5, 9; F7)."""
        await bench.fair(tenant_max_inflight=1)
        await fill(bench, a=3)
        subscription = bench.subscribe()
        assert ids(await bench.take(subscription, 3)) == ["a0"]
        change = bench.arrange(order=Order.FIFO, tenant_max_inflight=None)
        assert await bench.wakes(subscription.receive(5, None), change) == ["a1", "a2"]

    async def test_swapped_under_load(self, bench: Bench) -> None:
        """While the order changes often, each task is delivered exactly once (laws 1, 2, 9; B12, OPEN-B3)."""
        await bench.fair()
        await fill(bench, a=300, b=300, c=300, d=300)
        await bench.publish(*(f"e{n}" for n in range(60)), tenant="e", priority=8)
        taken: list[str] = []

        async def work(number: int) -> None:
            subscription = bench.subscribe(consumer=f"w{number}")
            while True:
                received = await subscription.receive(1 + number, 0)
                taken.extend(ids(received.deliveries))
                if received.deliveries:
                    await subscription.ack(*received.deliveries)
                elif not received.again:
                    return
                await asyncio.sleep(0)

        working = [await bench.start(work(number)) for number in range(5)]
        for order in (Order.FIFO, Order.FAIR) * 5:
            await bench.arrange(order=order)
            await bench.hop(10)
        await asyncio.gather(*working)
        await bench.expect(done=1260)
        assert len(set(taken)) == len(taken) == 1260

    async def test_swapped_over_and_over(self, bench: Bench) -> None:
        """After each change, deliveries follow the new order; each tenant's tasks stay in sequence (law 4; B12)."""
        await bench.fair()
        await fill(bench, a=30, b=20, c=10)
        subscription, taken = bench.subscribe(), list[str]()
        for _ in range(5):
            remaining = Counter(a=30, b=20, c=10) - Counter(map(tenant_of, taken))
            fair = await bench.drain(subscription, count=6)
            _check_rounds(fair, remaining)
            await bench.arrange(order=Order.FIFO)
            fifo = await bench.drain(subscription, count=6, limit=4)
            assert fifo == sorted(fifo, key=_published)
            taken += fair + fifo
            await bench.fair()
        assert len(set(taken)) == 60
        for tenant in "abc":
            own = [name for name in taken if name[0] == tenant]
            assert own == sorted(own, key=_published), (
                f"wrong order of the tasks of tenant {tenant!r} (law 4)"
            )


def _published(name: str) -> tuple[str, int]:
    tenant = tenant_of(name)
    return tenant, int(name.removeprefix(tenant))


def _check_rounds(taken: Sequence[str], there: Counter[str]) -> None:
    """Fail if a tenant has two turns while another tenant with waiting tasks has none.

    ``there`` is the number of waiting tasks of each tenant.
    """
    remaining, served = there.copy(), set[str]()
    for name in taken:
        tenant = tenant_of(name)
        if tenant in served:
            waits = {other for other in remaining if remaining[other] > 0} - served
            assert not waits, (
                f"in {list(taken)}, {name} comes before the turn of the tenants {waits} (law 4)"
            )
            served = set()
        served.add(tenant)
        remaining[tenant] -= 1
