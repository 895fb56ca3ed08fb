"""Closing a subscription releases its deliveries at once, and closing a backend closes its subscriptions."""

from __future__ import annotations

from contextlib import suppress

import pytest

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.tasks import Received


class ClosingSuite(Harness):
    """Tests of `Subscription.close`, of iteration, and of `Backend.aclose`."""

    async def test_close_releases(self, bench: Bench) -> None:
        """Closing a subscription releases its deliveries at once, in order, without losses (law 3; REV-E3, REV-E6)."""
        await bench.publish("t1", "t2", "t3")
        closed, other = bench.subscribe(), bench.subscribe(consumer="another")
        await bench.take(closed, 2)
        await closed.close()
        taken = await bench.take(other, 4)
        assert ids(taken) == ["t1", "t2", "t3"], "released tasks must precede new ones (law 4)"
        assert {(delivery.attempt, delivery.losses) for delivery in taken} == {(1, 0)}

    async def test_close_leaves_others_alone(self, bench: Bench) -> None:
        """Closing a subscription releases no deliveries of the worker's other subscriptions (law 2; REV-E5, REV-E6)."""
        await bench.publish("t1", "t2")
        subscription, two = bench.subscribe(), bench.subscribe()
        await bench.one(subscription)
        delivery = await bench.one(two)
        await subscription.close()
        assert ids(await bench.take(two, 2)) == ["t1"]
        await two.ack(delivery)
        await bench.expect(done=1, in_flight=1)

    async def test_close_leaves_the_settled_alone(self, bench: Bench) -> None:
        """Closing a subscription does not release deliveries that it has settled (law 2)."""
        subscription, first, second = await bench.all_running("t1", "t2")
        await subscription.ack(first)
        await subscription.redeliver(second)
        other = bench.subscribe(consumer="another")
        assert ids([await bench.one(other)]) == ["t2"]
        await subscription.close()
        assert await bench.take(other) == [], "a settled delivery was released (law 2)"

    async def test_close_ends_a_waiting_receive(self, bench: Bench) -> None:
        """A waiting receive returns no deliveries when its subscription is closed."""
        subscription = bench.subscribe()
        waiting = await bench.start(subscription.receive(1, None))
        await subscription.close()
        assert (await bench.outcome(waiting)).deliveries == ()

    async def test_close_twice(self, bench: Bench) -> None:
        """A subscription can be closed twice."""
        subscription = bench.subscribe()
        await subscription.close()
        await subscription.close()

    async def test_receive_after_close(self, bench: Bench) -> None:
        """A receive on a closed subscription raises `SubscriptionClosed`, whatever its timeout."""
        subscription = await bench.subscribed("t1")
        await subscription.close()
        for timeout in (0, None):
            with pytest.raises(SubscriptionClosed):
                await subscription.receive(1, timeout)
        await bench.expect(waiting=1)

    async def test_context_manager(self, bench: Bench) -> None:
        """Leaving the ``async with`` block closes the subscription, even after an error."""
        await bench.publish("t1")
        with suppress(ZeroDivisionError):
            async with bench.subscribe() as subscription:
                await bench.one(subscription)
                raise ZeroDivisionError
        with pytest.raises(SubscriptionClosed):
            await subscription.receive(1, 0)
        assert ids(await bench.take(bench.subscribe())) == ["t1"]

    async def test_iteration(self, bench: Bench) -> None:
        """``async for`` yields deliveries one by one, waits for more, and ends when the subscription is closed."""
        subscription = bench.subscribe(KEY, OTHER)
        observed = []

        async def consume() -> None:
            async for delivery in subscription:
                observed.append(delivery.task.id)
                await subscription.ack(delivery)

        consumer = await bench.start(consume())
        await bench.publish("t1", "t2")
        await bench.until(lambda: len(observed) == 2, "for two deliveries of waiting tasks")
        await bench.publish("t3", key=OTHER)
        await bench.until(lambda: len(observed) == 3, "for a delivery of a later task")
        await subscription.close()
        await bench.outcome(consumer)
        assert observed == ["t1", "t2", "t3"]

    async def test_aclose(self, bench: Bench) -> None:
        """Closing the backend closes its subscriptions and ends waiting receives. The backend can be closed twice."""
        subscription = bench.subscribe()
        waiting = await bench.start(subscription.receive(1, None))
        await bench.backend.aclose()
        assert (await bench.outcome(waiting)).deliveries == ()
        await bench.backend.aclose()
        with pytest.raises(SubscriptionClosed):
            await subscription.receive(1, 0)

    async def test_aclose_unused(self, bench: Bench) -> None:
        """A backend that was never used can be closed."""
        await bench.backend.aclose()

    async def test_health(self, bench: Bench) -> None:
        """``health`` names the backend, reports ``ok`` while it is open, and never raises, even after ``aclose``."""
        health = await bench.backend.health()
        assert health.ok, f"a fresh backend is not healthy: {health}"
        assert health.backend, "health must name the backend"
        await bench.backend.aclose()
        await bench.backend.health()

    async def test_capabilities_are_constant(self, bench: Bench) -> None:
        """The declared capabilities do not change while the backend is used."""
        declared = bench.backend.capabilities
        subscription = await bench.subscribed("t1")
        received: Received = await subscription.receive(1, 0)
        await subscription.ack(*received.deliveries)
        assert bench.backend.capabilities == declared
