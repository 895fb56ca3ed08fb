"""Since when a delivery had been waiting, as the metrics of a server on Redis tell it."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.tasks import Delivery, Task
from taskqueue_redis import RedisBackend

AT_ONCE = 0.05
"""seconds by which the store's clock, as it is known here, may be wrong"""


@pytest.mark.parametrize("order", [Order.FIFO, Order.FAIR])
async def test_since_when_it_waited(redis_url: str, order: Order) -> None:
    """E5: it is from when a task was published, due or handed back, in whatever order the queue hands out."""
    assert redis_url
    backend = RedisBackend()
    try:
        await backend.control.configure("k", QueueSettings(order=order))
        assert (await backend.health()).ok
        start = backend.now()
        await backend.publisher.publish(
            Task(key="k", id="now", tenant="a"), Task(key="k", id="second", tenant="a")
        )
        sent = backend.now() + AT_ONCE
        await backend.publisher.publish(
            Task(key="k", id="due", not_before=start + 0.2, tenant="a", headers={"h": "x"})
        )
        subscription = backend.subscribe(["k"], "w")

        async def one() -> Delivery:
            (got,) = (await subscription.receive(1, 5)).deliveries
            assert got.waiting_since is not None
            assert got.waiting_since <= got.delivered_at
            return got

        await asyncio.sleep(0.1)
        first = await one()
        assert start - AT_ONCE <= (first.waiting_since or 0) <= sent
        assert first.delivered_at - (first.waiting_since or 0) >= 0.1 - AT_ONCE
        before = backend.now()
        await subscription.redeliver(first)
        again = await one()
        assert again.task.id == "now"
        assert (again.waiting_since or 0) >= before - AT_ONCE
        second, due = await one(), await one()
        assert (second.task.id, due.task.id) == ("second", "due")
        assert (second.waiting_since or 0) <= sent
        assert (due.waiting_since or 0) >= start + 0.2 - AT_ONCE
        await subscription.close()
    finally:
        await backend.aclose()
