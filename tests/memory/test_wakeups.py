"""Waiting receives use no processor time, and each available task wakes exactly one of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Received, Task
from taskqueue_memory import MemoryBackend
from taskqueue_memory.subscription import MemorySubscription


async def hop() -> None:
    """Let all coroutines that are ready run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def waiting(
    *subscriptions: MemorySubscription, limit: int = 1
) -> list[asyncio.Task[Received]]:
    """Start a receive on each subscription and return the tasks once all of them wait."""
    receives = [asyncio.ensure_future(s.receive(limit, None)) for s in subscriptions]
    await hop()
    return receives


def ids(receives: list[asyncio.Task[Received]]) -> list[list[str]]:
    """Return the task ids that each finished receive delivered."""
    return [[delivery.task.id for delivery in receive.result().deliveries] for receive in receives]


async def stop(*receives: asyncio.Task[Received]) -> None:
    """Cancel the receives that are still waiting."""
    for receive in receives:
        receive.cancel()
    await asyncio.gather(*receives, return_exceptions=True)


def counted_looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one entry each time a receive looks for work."""
    looks: list[int] = []
    look = MemorySubscription._take

    def counted(self: MemorySubscription, limit: int) -> Received:
        looks.append(1)
        return look(self, limit)

    monkeypatch.setattr(MemorySubscription, "_take", counted)
    return looks


async def test_an_idle_receive_schedules_nothing(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5: 1,000 waiting subscriptions set no timer, schedule no callback and do not look for work."""
    looks = counted_looks(monkeypatch)
    subscriptions = [backend.subscribe(["k"], f"w{n}") for n in range(1000)]
    receives = await waiting(*subscriptions)
    loop: Any = asyncio.get_running_loop()
    assert len(looks) == 1000
    assert not loop._ready
    assert not [timer for timer in loop._scheduled if not timer.cancelled()]
    await asyncio.sleep(0.05)
    assert len(looks) == 1000
    await stop(*receives)


async def test_each_task_wakes_one_of_many(backend: MemoryBackend) -> None:
    """Three published tasks wake three of 1,000 waiting receives, and each gets one task."""
    receives = await waiting(*(backend.subscribe(["k"], f"w{n}") for n in range(1000)))
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(3)))
    await hop()
    done = [receive for receive in receives if receive.done()]
    assert ids(done) == [["t0"], ["t1"], ["t2"]]
    await stop(*receives)


async def test_those_who_wait_take_turns(backend: MemoryBackend) -> None:
    """Waiting subscriptions take turns, so that all of them get the same number of tasks."""
    subscriptions = [backend.subscribe(["k"], f"w{n}") for n in range(5)]
    taken: Counter[str] = Counter()

    async def work(subscription: MemorySubscription) -> None:
        async for delivery in subscription:
            taken[subscription.consumer] += 1
            await subscription.ack(delivery)

    workers = [asyncio.ensure_future(work(s)) for s in subscriptions]
    await hop()
    for n in range(100):
        await backend.publisher.publish(Task(key="k", id=f"t{n}"))
        await hop()
    assert set(taken.values()) == {20}
    for subscription in subscriptions:
        await subscription.close()
    await asyncio.gather(*workers)


async def test_a_cancelled_receive_passes_its_wake_up_on(backend: MemoryBackend) -> None:
    """Fault E4: if a receive is cancelled after its wake-up, the task goes to the next waiting receive."""
    one, other = backend.subscribe(["k"], "w1"), backend.subscribe(["k"], "w2")
    first, second = await waiting(one, other)
    await backend.publisher.publish(Task(key="k", id="t"))
    first.cancel()
    await hop()
    assert first.cancelled()
    assert ids([second]) == [["t"]]


async def test_a_closed_subscription_is_not_woken_for_its_own(backend: MemoryBackend) -> None:
    """Fault E4: a delivery released by closing a subscription goes to another subscription.

    It does not go to the closed subscription's own waiting receive.
    """
    one, other = backend.subscribe(["k"], "w1"), backend.subscribe(["k"], "w2")
    await backend.publisher.publish(Task(key="k", id="t"))
    assert (await one.receive(1, 0)).deliveries
    first, second = await waiting(one, other)
    await one.close()
    await hop()
    assert ids([first, second]) == [[], ["t"]]


async def test_a_wake_up_is_for_one_task(backend: MemoryBackend) -> None:
    """Two tasks wake two receives: one that was already woken for the first task is not woken for the second."""
    both, one = backend.subscribe(["a", "b"], "both"), backend.subscribe(["b"], "one")
    receives = await waiting(both, one)
    await backend.publisher.publish(Task(key="a", id="a1"), Task(key="b", id="b1"))
    await hop()
    assert ids(receives) == [["a1"], ["b1"]]


async def test_a_new_receive_after_a_cancelled_one(backend: MemoryBackend) -> None:
    """A cancelled receive does not prevent the next receive on the same subscription from being woken."""
    subscription = backend.subscribe(["k"], "w")
    (first,) = await waiting(subscription)

    async def publish_later() -> None:
        await hop()
        await backend.publisher.publish(Task(key="k", id="t"))

    later = asyncio.ensure_future(publish_later())
    first.cancel()
    async with asyncio.timeout(30):
        # This receive starts before the cancelled one has ended.
        received = await subscription.receive(1, None)
    assert [delivery.task.id for delivery in received.deliveries] == ["t"]
    await later


async def test_falling_due_wakes(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 8: a scheduled task wakes a waiting receive exactly at its time, without a maintenance pass."""
    receives = await waiting(backend.subscribe(["k"], "w1"), backend.subscribe(["k"], "w2"))
    for task_id, wait in (("b", 2.0), ("a", 1.0)):
        await backend.publisher.publish(Task(key="k", id=task_id, not_before=clock.now() + wait))
    await clock.advance(0.999)
    assert not any(receive.done() for receive in receives)
    await clock.advance(0.001)
    assert ids(receives[:1]) == [["a"]]
    await clock.advance(1)
    assert ids(receives) == [["a"], ["b"]]


async def test_timing_out_keeps_nothing(backend: MemoryBackend, clock: ManualClock) -> None:
    """A receive that timed out is no longer woken, and leaves no timer behind."""
    subscription = backend.subscribe(["k"], "w")
    receive = asyncio.ensure_future(subscription.receive(1, 5))
    await hop()
    await clock.advance(5)
    assert ids([receive]) == [[]]
    assert not backend._store.queues["k"].waiting
    await backend.publisher.publish(Task(key="k", id="t"))
    (second,) = await waiting(subscription)
    assert ids([second]) == [["t"]]


async def test_timers_of_woken_receives_are_cancelled(backend: MemoryBackend) -> None:
    """A receive that is woken before its timeout cancels its timer."""
    subscription = backend.subscribe(["k"], "w")
    for n in range(100):
        receive = asyncio.ensure_future(subscription.receive(1, 3600))
        await asyncio.sleep(0)
        await backend.publisher.publish(Task(key="k", id=f"t{n}"))
        await subscription.ack(*(await receive).deliveries)
    calls = backend._store.clock._calls  # type: ignore[attr-defined]
    assert not [timer for _, _, timer in calls if timer._callback is not None]
