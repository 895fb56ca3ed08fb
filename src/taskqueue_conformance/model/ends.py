"""The ways in which a delivery can end, each of which makes room for another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from taskqueue_conformance.bench import KEY, Bench
from taskqueue_core.backend import Subscription
from taskqueue_core.tasks import Delivery, Received, Settled

End = Callable[[Bench, Subscription, Delivery], Awaitable[None]]


async def ack(_: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Ack the delivery."""
    await subscription.ack(delivery)


async def redeliver(_: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Release the delivery."""
    await subscription.redeliver(delivery)


async def lose(_: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Report the delivery as lost with its consumer."""
    assert await subscription.redeliver(delivery, lost=True) == (Settled.OK,)


async def cancel(bench: Bench, _: Subscription, delivery: Delivery) -> None:
    """Cancel the task."""
    assert await bench.control.cancel(KEY, delivery.task.id)


async def close(_: Bench, subscription: Subscription, __: Delivery) -> None:
    """Close the subscription."""
    await subscription.close()


async def frees(
    bench: Bench, end: End, *, tenant: str | None = None, deadline: float | None = None
) -> None:
    """Have one task in flight and a receive wait for its place, then ``end`` it: the wait must end, too."""
    item, two = bench.subscribe(), bench.subscribe(consumer="another")
    first, second = f"{end.__name__}1", f"{end.__name__}2"
    at = None if deadline is None else bench.now + deadline
    await bench.publish(first, tenant=tenant, deadline=at)
    await bench.publish(second, tenant=tenant)
    delivery = await bench.one(item)
    await held(two)
    waiting = await bench.start(two.receive(5, None))
    assert not waiting.done(), "delivered beyond the limit (law 5)"
    await end(bench, item, delivery)
    taken = (await bench.outcome(waiting)).deliveries
    assert len(taken) == 1, f"{len(taken)} in flight, the limit is 1 (law 5)"
    await two.ack(*taken)
    await bench.control.purge(KEY)
    for subscription in (item, two):
        await subscription.close()


async def held(subscription: Subscription) -> Received:
    """Receive nothing, of a queue that has something: a limit holds it up."""
    for _ in range(10):  # a bounded step may ask to be followed by another
        received = await subscription.receive(5, 0)
        assert received.deliveries == (), "delivered beyond a limit (law 5)"
        if not received.again:
            return received
    raise AssertionError("`again` without end, though a limit holds everything up")
