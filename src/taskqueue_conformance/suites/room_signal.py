"""The capability ``flow``: a signal for publishers that wait for capacity."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from taskqueue_conformance.bench import KEY, OTHER, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.slots.helpers import LONG
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Published, Task


class RoomSuite(Harness, needs=(Capability.FLOW, Capability.CONTROL)):
    """Tests of `RoomSignals`."""

    async def test_room_notifies(self, bench: Bench) -> None:
        """A first delivery, a cancel, an expiry or a purge wakes a waiting publisher at once (law 6; B13)."""

        async def take() -> None:
            await bench.one(bench.subscribe())

        async def cancel() -> None:
            assert await bench.control.cancel(KEY, "cancel")

        async def expire() -> None:
            await bench.advance(bench.short)
            await bench.control.maintain()

        async def purge() -> None:
            assert await bench.control.purge(KEY) == 1

        await bench.limit(capacity=1)
        for bring in (take, cancel, expire, purge):
            deadline = bench.now + bench.short if bring is expire else None
            await bench.publish(bring.__name__, deadline=deadline)
            await _notifies(bench, bring)

    async def test_resumed_intake_notifies(self, bench: Bench) -> None:
        """The end of ``intake_paused`` wakes waiting publishers (laws 6, 9; B13)."""
        await bench.limit(intake_paused=True)
        await _notifies(bench, lambda: bench.limit(intake_paused=False))

    async def test_settings_notify(self, bench: Bench) -> None:
        """A raised or removed capacity wakes waiting publishers (laws 6, 9; B13, F7)."""
        await bench.limit(capacity=1)
        await bench.publish("t1")
        await _notifies(bench, lambda: bench.limit(capacity=2))
        await bench.publish("t2", "t3")
        await _notifies(bench, lambda: bench.limit(capacity=None))

    @needs(Capability.FAIR_ORDER)
    async def test_tenants_room_notifies(self, bench: Bench) -> None:
        """When a tenant's capacity becomes free, a publisher that waits for this capacity wakes (law 6; B5)."""
        await bench.fair(tenant_capacity=1)
        await bench.publish("a0", tenant="a")
        await bench.publish("b0", tenant="b")

        async def take() -> None:
            await bench.take(bench.subscribe(), 2)

        await _notifies(bench, take, tenant="b")

    async def test_no_notification_is_missed(self, bench: Bench) -> None:
        """A wait ends at once if there was a change since the previous wait, or since the signal was opened (law 6)."""
        await bench.limit(capacity=1)
        subscription = bench.subscribe()
        async with bench.room_signal() as signal:
            for number in range(5):
                await bench.publish(f"t{number}")
                await subscription.ack(await bench.one(subscription))
                await bench.outcome(await bench.start(signal.wait(LONG)))

    async def test_one_of_several_queues(self, bench: Bench) -> None:
        """A signal for several queues fires for each of them (law 6)."""
        await bench.limit(capacity=1)
        await bench.limit(OTHER, capacity=1)
        await bench.publish("t1")
        await bench.publish("o1", key=OTHER)
        subscription = bench.subscribe(OTHER)
        await bench.fires(bench.room_signal(KEY, OTHER), bench.one(subscription))

    async def test_waiting_has_an_end(self, bench: Bench) -> None:
        """Without free capacity, a wait ends after its timeout, and raises no error."""
        await bench.limit(capacity=1)
        await bench.publish("t1")
        async with bench.room_signal() as signal:
            waiting = await bench.start(signal.wait(bench.short))
            await bench.advance(bench.short)
            await bench.outcome(waiting)

    async def test_it_does_not_fire_all_the_time(self, bench: Bench) -> None:
        """A signal may fire without cause, but not so often that waiting for it amounts to polling (B13)."""
        await bench.limit(capacity=1)
        await bench.publish("t1")
        async with bench.room_signal() as signal:
            await bench.silent(signal)

    async def test_a_cancelled_wait(self, bench: Bench) -> None:
        """A cancelled wait takes no notification away from the next wait or from another signal (law 6)."""
        await bench.limit(capacity=1)
        await bench.publish("t1")
        async with bench.room_signal() as signal, bench.room_signal() as two:
            given_up = await bench.silent(signal)
            there = await bench.silent(two)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            here = await bench.start(signal.wait(LONG))
            await bench.one(bench.subscribe())
            await bench.outcome(here)
            await bench.outcome(there)

    async def test_many_wait_for_room(self, bench: Bench) -> None:
        """If many publishers wait for a queue with a small capacity, all of them succeed in the end (law 6)."""
        await bench.limit(capacity=2)

        tasks = [bench.task(f"t{number}") for number in range(20)]
        waiting = [await bench.start(_publish_with_patience(bench, task)) for task in tasks]
        subscription = bench.subscribe()
        for _ in range(20):
            call = await bench.start(subscription.receive(1, None))
            await subscription.ack(*(await bench.outcome(call)).deliveries)
        for waiter in waiting:
            await bench.outcome(waiter)
        await bench.expect(done=20)

    @needs("shared")
    async def test_notifies_across_replicas(self, bench: Bench) -> None:
        """When one replica frees capacity, publishers at another replica wake (law 6; E1)."""
        other = await bench.replica()
        await bench.limit(capacity=1)
        await bench.publish("t1")
        async with other.room_signal() as signal:
            waiting = await other.start(signal.wait(LONG))
            await bench.one(bench.subscribe())
            await other.outcome(waiting)
            await bench.publish("t2")
            waiting = await other.start(signal.wait(LONG))
            await bench.limit(capacity=5)
            await other.outcome(waiting)


async def _notifies(
    bench: Bench, bring: Callable[[], Awaitable[object]], *, tenant: str | None = None
) -> None:
    """Fail unless a publisher that waits for a full queue succeeds after ``bring`` has freed capacity."""
    bench.numbers += 1
    task = bench.task(f"new{bench.numbers}", tenant=tenant)
    waiting = await bench.start(_publish_with_patience(bench, task))
    assert not waiting.done(), "the full queue accepted a task (law 6)"
    await bring()
    await bench.outcome(waiting)
    await bench.control.purge(KEY)


async def _publish_with_patience(bench: Bench, task: Task) -> None:
    """Publish a task; while it is refused, wait for the room signal and publish it again."""
    async with bench.room_signal() as signal:
        while True:
            (answer,) = await bench.offer(task)
            if answer.status is Published.ACCEPTED:
                return
            await signal.wait(LONG)
