"""The time since which a delivered task had been waiting, from which the server computes its metrics."""

from __future__ import annotations

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Delivery
from tests.redis.backends import KEY, opened, publish, take


def exactly(at: float) -> object:
    """Return an object that equals a time to the millisecond."""
    return pytest.approx(at, rel=0, abs=0.001)


@pytest.mark.parametrize("order", [Order.FIFO, Order.FAIR])
async def test_since_when_it_waited(redis_url: str, redis_prefix: str, order: Order) -> None:
    """E5: the waiting time of a task starts at its publish, its due time or its release, in fair and in FIFO order."""
    clock = ManualClock(1_700_000_000.0)
    start = clock.now()
    async with opened(redis_url, redis_prefix, clock=clock, lease=60.0) as backend:
        await backend.control.configure(KEY, QueueSettings(order=order))
        await publish(backend, "now", "second", tenant="a")
        await publish(backend, "due", not_before=start + 2, tenant="a", headers={"h": "x"})
        async with backend.subscribe([KEY], "w") as subscription:

            async def one() -> Delivery:
                (found,) = await take(subscription, 1)
                return found

            await clock.advance(1)
            first = await one()
            assert first.task.id == "now"
            assert (first.waiting_since, first.delivered_at) == (exactly(start), exactly(start + 1))
            await clock.advance(2)
            await subscription.redeliver(first)
            await clock.advance(1)
            again, second, due = [await one() for _ in range(3)]
            assert [one.task.id for one in (again, second, due)] == ["now", "second", "due"]
            assert start + 3 <= (again.waiting_since or 0) <= start + 4.001
            assert second.waiting_since == exactly(start)
            assert start + 2 <= (due.waiting_since or 0) <= start + 4.001
