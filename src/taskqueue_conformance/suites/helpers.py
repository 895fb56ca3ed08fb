"""Helpers that several suites share: ways to end a delivery, and checks of limits and refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_core.backend import Subscription
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Confirmation, Delivery, Published, Received, Refusal, Settled

End = Callable[[Bench, Subscription, Delivery], Awaitable[None]]


async def ack(_: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Ack the delivery."""
    await subscription.ack(delivery)


async def redeliver(_: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Release the delivery."""
    await subscription.redeliver(delivery)


async def lose(_: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Report the delivery as lost."""
    assert await subscription.redeliver(delivery, lost=True) == (Settled.OK,)


async def cancel(bench: Bench, _: Subscription, delivery: Delivery) -> None:
    """Cancel the task."""
    assert await bench.control.cancel(KEY, delivery.task.id)


async def close(_: Bench, subscription: Subscription, __: Delivery) -> None:
    """Close the subscription."""
    await subscription.close()


async def bury(bench: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Turn the task into a dead letter."""
    await bench.bury(subscription, delivery)


async def poison(bench: Bench, subscription: Subscription, delivery: Delivery) -> None:
    """Allow no losses, and report the delivery as lost, so that its task becomes a dead letter."""
    await bench.configure(max_losses=0)
    assert await subscription.redeliver(delivery, lost=True) == (Settled.DEAD,)


async def expire(bench: Bench, _: Subscription, __: Delivery) -> None:
    """Let the deadline of the task pass, and run maintenance."""
    await bench.advance(bench.short)
    await bench.control.maintain()


async def frees(bench: Bench, end: End, *, deadline: float | None = None, **fields: Any) -> None:
    """Fail unless ending a delivery with ``end`` wakes a receive that a limit or an ordering key blocks.

    Two tasks are published with ``fields``. The first task is in flight, and the second waits until the delivery ends.
    """
    item, two = bench.subscribe(), bench.subscribe(consumer="another")
    first, second = f"{end.__name__}1", f"{end.__name__}2"
    at = None if deadline is None else bench.now + deadline
    await bench.publish(first, deadline=at, **fields)
    await bench.publish(second, **fields)
    delivery = await bench.one(item)
    await held(two)
    waiting = await bench.start(two.receive(5, None))
    assert not waiting.done(), "a task was delivered that must wait for another one (laws 4, 5)"
    await end(bench, item, delivery)
    taken = (await bench.outcome(waiting)).deliveries
    assert len(taken) == 1, (
        f"wrong number of deliveries after the end of the first: expected 1, got {len(taken)}"
    )
    await two.ack(*taken)
    await bench.control.purge(KEY)
    for subscription in (item, two):
        await subscription.close()


async def held(subscription: Subscription) -> Received:
    """Fail if a receive delivers a task that a limit or an ordering key must block; return the empty answer."""
    # A receive does a limited amount of work, and sets ``again`` if the receive must be repeated.
    for _ in range(10):
        received = await subscription.receive(5, 0)
        assert not received.deliveries, f"{ids(received.deliveries)} must wait (laws 4, 5)"
        if not received.again:
            return received
    raise AssertionError("`again` stays true: expected false, because no task may be delivered")


def check_opening(received: Received, at: float) -> None:
    """Fail unless an empty answer says that a limit allows the next delivery at the time ``at``."""
    assert received.due_at is not None, "an empty answer must contain the time of the next delivery"
    assert abs(received.due_at - at) < 0.01, f"wrong due_at: expected {at}, got {received.due_at}"


def check_rate(deliveries: Iterable[Delivery], limit: RateLimit) -> None:
    """Fail if any period has more deliveries than a full bucket and its refill allow."""
    times = sorted(delivery.delivered_at for delivery in deliveries)
    for index, start in enumerate(times):
        for count, end in enumerate(times[index:], 1):
            allowed = limit.max_tokens + (end - start) * limit.max_tokens / limit.period
            assert count <= allowed + 0.01, (
                f"too many deliveries in {end - start:.3f} s: expected {allowed:.2f}, got {count} (law 5)"
            )


def check_refused(
    answer: Confirmation, code: Refusal, *, depth: int | None = None, by: str = ""
) -> None:
    """Fail unless a task was refused with ``code``, a reason, and the data that a publisher needs to retry."""
    assert answer.status is Published.REFUSED, f"a publish was not refused (law 6): {answer}"
    assert answer.code is code, "refused with the wrong code (law 6)"
    assert answer.reason, "refused without a reason (law 6)"
    assert by in answer.reason, f"the reason {answer.reason!r} does not name {by!r} (law 6)"
    assert depth in (None, answer.depth), (
        f"wrong depth: expected {depth}, got {answer.depth} (law 6)"
    )
    assert not answer.stored, "a refused task was stored (law 6)"
    if code is Refusal.MOVED:
        assert answer.retry_after is None, "a queue that has moved must not suggest a retry (law 6)"
    else:
        assert (answer.retry_after or 0) > 0, "refused without retry_after (law 6)"
