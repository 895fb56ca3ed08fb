"""The capability ``floor_share``: each waiting priority gets a share of the deliveries, so that none starves."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import held
from taskqueue_conformance.suites.order import fill
from taskqueue_core.backend import Capability


class FloorSuite(Harness, needs=(Capability.FLOOR_SHARE, Capability.CONTROL)):
    """Tests of ``floor_share``."""

    async def test_share_of_the_lowest(self, bench: Bench) -> None:
        """While higher priorities wait, the lowest gets its share of deliveries, evenly spread (law 4; OPEN-C8)."""
        for share in (0.1, 0.25, 0.3, 0.5):
            key = f"share{share}"
            await bench.arrange(key, floor_share=share)
            await _publish(bench, high=200, low=80, key=key)
            subscription, two = bench.subscribe(key), bench.subscribe(key, consumer="another")
            taken = await bench.drain(subscription, two, count=140, limit=3)
            _check_share(taken, share)
            for name in ("high", "low"):
                own = [int(task.removeprefix(name)) for task in taken if task.startswith(name)]
                assert own == sorted(own), f"wrong order within a priority: {own} (law 4)"

    async def test_share_of_each(self, bench: Bench) -> None:
        """Each of three or ten waiting priorities gets its share, evenly spread; the highest gets the rest (law 4).

        If the shares amount to more than all deliveries, each priority gets an equal part (OPEN-C8).
        """
        for priorities, share in (((8, 5, 1), 0.1), (range(9, -1, -1), 0.05), (range(10), 0.5)):
            key = f"share{len(priorities)}-{share}"
            await bench.arrange(key, floor_share=share)
            for priority in priorities:
                names = (
                    f"{priority}-{n}" for n in range(120 if priority == max(priorities) else 25)
                )
                await bench.publish(*names, key=key, priority=priority)
            subscription, two = bench.subscribe(key), bench.subscribe(key, consumer="another")
            taken = await bench.drain(subscription, two, count=120, limit=7)
            window = max(ceil(1 / share), len(priorities)) + 1
            for priority in priorities:
                own = [name.startswith(f"{priority}-") for name in taken]
                for start in range(len(taken) - window + 1):
                    assert any(own[start : start + window]), (
                        f"{window} deliveries in a row without one of priority {priority} (law 4)"
                    )
                exact = len(taken) * min(share, 1 / len(priorities))
                assert priority == max(priorities) or sum(own) <= exact + 1, (
                    f"priority {priority}: expected {exact} of {len(taken)}, got {sum(own)} (law 4)"
                )

    async def test_share_of_the_remaining(self, bench: Bench) -> None:
        """A priority without waiting tasks has no share, and leaves none to the others (law 4; OPEN-C8)."""
        await bench.arrange(floor_share=0.2)
        await _publish(bench, high=60, low=6)
        await bench.publish(*(f"middle{n}" for n in range(20)), priority=5)
        for count, low, middle in ((30, 6, 6), (25, 0, 5)):
            taken = await bench.drain(bench.subscribe(), count=count)
            for name, expected in (("low", low), ("middle", middle)):
                found = sum(task.startswith(name) for task in taken)
                assert abs(found - expected) <= 1, (
                    f"wrong share of {name}: expected {expected} of {count}, got {found} (law 4)"
                )

    async def test_nothing_is_owed(self, bench: Bench) -> None:
        """Deliveries without a competing priority do not increase the later shares of lower priorities (law 4)."""
        await bench.arrange(floor_share=0.1)
        await _publish(bench, high=150)
        subscription = bench.subscribe()
        await bench.drain(subscription, count=50, limit=10)
        await _publish(bench, low=20)
        _check_share(await bench.drain(subscription, count=50, limit=3), 0.1)
        await bench.control.purge(KEY)
        await _publish(bench, low=60, start=20)
        await bench.drain(subscription, count=40, limit=10)
        await _publish(bench, high=60, start=150)
        _check_share(await bench.drain(subscription, count=50), 0.1)

    async def test_share_changes(self, bench: Bench) -> None:
        """A new, changed or removed share applies to the next deliveries (laws 4, 9; F7)."""
        await _publish(bench, high=200, low=50)
        subscription = bench.subscribe()
        for share in (0.0, 0.25, 0.1, 0.5, 0.0):
            await bench.arrange(floor_share=share)
            _check_share(await bench.drain(subscription, count=30, limit=4), share)

    async def test_share_and_returned_ones(self, bench: Bench) -> None:
        """A released task is delivered first in its priority, and counts against the share again (laws 3, 4)."""
        await bench.arrange(floor_share=0.5)
        await _publish(bench, high=9, low=9)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, 4)
        assert sorted(ids(taken)) == ["high0", "high1", "low0", "low1"]
        await subscription.redeliver(*taken)
        again = await bench.take(subscription, 6)
        names = ["high0", "high1", "high2", "low0", "low1", "low2"]
        assert sorted(ids(again)) == names

    @needs(Capability.FAIR_ORDER)
    async def test_share_of_who_can_be_served(self, bench: Bench) -> None:
        """A priority that is blocked by a limit gets no share, and the others get theirs (laws 4, 5)."""
        await bench.fair(floor_share=0.5, tenant_max_inflight=1)
        await fill(bench, a=2, priority=1)
        await fill(bench, b=3, start=5, priority=5)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, 9)
        assert sorted(ids(taken)) == ["a0", "b5"]
        await held(subscription)
        for n in range(8):
            await bench.publish(f"t{n}", tenant=f"t{n}", priority=8)
        assert len(await bench.take(subscription, 9)) == 8
        await bench.arrange(tenant_max_inflight=None)
        assert sorted(ids(await bench.take(subscription, 9))) == ["a1", "b6", "b7"]

    @needs(Capability.ORDERING_KEYS)
    async def test_share_and_entities(self, bench: Bench) -> None:
        """While a task waits for its ordering key, its priority gets no share and saves none for later (law 4; R8)."""
        await bench.arrange(floor_share=0.5)
        subscription, first = await bench.running("low0", "low1", priority=1, ordering_key="e")
        await _publish(bench, high=6)
        assert ids(await bench.take(subscription, 4)) == [f"high{n}" for n in range(4)]
        await subscription.ack(first)
        assert sorted(ids(await bench.take(subscription, 2))) == ["high4", "low1"]

    @needs(Capability.FAIR_ORDER)
    async def test_share_and_tenants(self, bench: Bench) -> None:
        """Tenants also take turns within a lower priority (law 4; OPEN-C8, B2)."""
        await bench.fair(floor_share=0.25)
        await fill(bench, a=20, b=20, priority=1)
        await fill(bench, x=40, y=40, priority=8)
        taken = await bench.drain(bench.subscribe(), count=48, limit=5)
        lowest = [name for name in taken if name[0] in "ab"]
        assert 11 <= len(lowest) <= 13, (
            f"wrong share: expected 11 to 13 of 48, got {len(lowest)} (law 4)"
        )
        assert lowest == [f"{tenant}{n}" for n in range(10) for tenant in "ab"][: len(lowest)]
        highest = [name for name in taken if name[0] in "xy"]
        assert highest == [f"{tenant}{n}" for n in range(20) for tenant in "xy"][: len(highest)]


async def _publish(
    bench: Bench, *, start: int = 0, key: str = KEY, high: int = 0, low: int = 0
) -> None:
    """Publish ``high`` tasks with a high priority (``high0``, ``high1``…) and ``low`` tasks with a low priority."""
    for name, count, priority in (("high", high, 8), ("low", low, 1)):
        names = [f"{name}{n}" for n in range(start, start + count)]
        await bench.publish(*names, key=key, priority=priority)


def _check_share(taken: Sequence[str], share: float) -> None:
    """Fail unless the low priority has had its share of the deliveries, evenly spread."""
    lowest = [name.startswith("low") for name in taken]
    least, most = len(taken) * share * 0.8, len(taken) * share * 1.2 + 1
    assert int(least) <= sum(lowest) <= most, (
        f"wrong share: expected {int(least)} to {int(most)} of {len(taken)}, got {sum(lowest)} (law 4)"
    )
    if share:
        window = ceil(1 / share)
        for start in range(len(taken) - window):
            assert any(lowest[start : start + window + 1]), (
                f"{window + 1} deliveries in a row had a high priority (law 4)"
            )
    else:
        assert not any(lowest), "a lower priority was delivered before a higher one (law 4)"
