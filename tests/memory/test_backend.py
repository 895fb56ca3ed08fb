"""Properties of the memory backend alone: capabilities, creation, health, many queues, event loops and closing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskqueue_core.backend import Capability
from taskqueue_core.clock import ManualClock, SystemClock, Timer
from taskqueue_core.errors import InvalidInput
from taskqueue_core.loading import check_backend
from taskqueue_core.tasks import Ledger, Task
from taskqueue_memory import MemoryBackend, create_backend


def test_it_declares_what_it_is() -> None:
    """The memory backend declares every capability and atomic retries, but is neither shared nor durable."""
    capabilities = MemoryBackend.capabilities
    assert capabilities.names == set(Capability)
    assert (capabilities.shared, capabilities.durable, capabilities.atomic_retry) == (
        False,
        False,
        True,
    )


def test_making_one_does_nothing() -> None:
    """Creating a memory backend needs neither an event loop nor settings."""
    backend = create_backend()
    check_backend(backend, "memory")
    assert abs(backend.now() - time.time()) < 5


async def test_health(backend: MemoryBackend) -> None:
    """The health status has the number of queues; after closing, it is not OK."""
    await backend.publisher.publish(Task(key="a"), Task(key="b"))
    health = await backend.health()
    assert (health.ok, health.backend, health.details["queues"]) == (True, "memory", 2)
    assert health.details["durable"] is False
    await backend.aclose()
    await backend.aclose()
    assert not (await backend.health()).ok


async def test_many_queues(backend: MemoryBackend, clock: ManualClock) -> None:
    """Queues are cheap: 10,000 queues, each with one scheduled task, become available within three seconds."""
    keys = [f"k{n}" for n in range(10_000)]
    start = clock.now()
    for n, key in enumerate(keys):
        await backend.publisher.publish(Task(key=key, not_before=start + 1 + n / 100))
    begin = time.process_time()
    for _ in range(100):
        await clock.advance(1.0)
    await clock.advance(1.0)
    # If each due task needed a scan of all queues, this would take longer.
    assert time.process_time() - begin < 3
    assert await backend.control.queues() == tuple(sorted(keys))
    ledgers = [await backend.control.ledger(key) for key in keys]
    assert ledgers == [Ledger(published=1, waiting=1)] * 10_000


def test_one_loop_after_another() -> None:
    """A scheduled task published in an event loop that has ended wakes a receive in the next loop."""
    backend = MemoryBackend()

    async def publish() -> None:
        await backend.publisher.publish(Task(key="k", id="t", not_before=backend.now() + 0.05))

    async def receive() -> list[str]:
        async with backend.subscribe(["k"], "w") as subscription:
            received = await asyncio.wait_for(subscription.receive(1, None), 30)
            return [delivery.task.id for delivery in received.deliveries]

    asyncio.run(publish())
    assert asyncio.run(receive()) == ["t"]


@settings(max_examples=25, deadline=None)
@given(wait=st.floats(0.0001, 0.02))
async def test_never_early_in_real_time(wait: float) -> None:
    """Law 8: with the system clock too, a scheduled task is delivered, and not before its time."""
    backend = MemoryBackend(clock=SystemClock())
    at = backend.now() + wait
    await backend.publisher.publish(Task(key="k", not_before=at))
    (delivery,) = (await backend.subscribe(["k"], "w").receive(1, 60)).deliveries
    assert at <= delivery.delivered_at
    await backend.aclose()


class HastyClock(ManualClock):
    """A clock whose timers fire too early, as those of an event loop may."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Schedule the call for half of the remaining time."""
        return super().call_at((self.now() + when) / 2, callback)


async def test_a_timer_that_fires_too_early() -> None:
    """Law 8: a timer that fires too early delivers nothing early and is set again."""
    clock = HastyClock()
    backend = MemoryBackend(clock=clock)
    receive = asyncio.ensure_future(backend.subscribe(["k"], "w").receive(1, None))
    await asyncio.sleep(0)
    await backend.publisher.publish(Task(key="k", not_before=clock.now() + 8))
    await clock.advance(7.9)
    assert not receive.done()
    await clock.advance(0.1)
    assert len((await asyncio.wait_for(receive, 30)).deliveries) == 1
    await backend.aclose()


async def test_the_end_leaves_no_timer() -> None:
    """Closing the backend cancels all of its timers and ends a waiting receive."""
    backend = MemoryBackend()
    receive = asyncio.ensure_future(backend.subscribe(["k"], "w").receive(1, 3600))
    await backend.publisher.publish(Task(key="other", not_before=backend.now() + 3600))
    await asyncio.sleep(0)
    await backend.aclose()
    assert not (await receive).deliveries
    loop = asyncio.get_running_loop()
    assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


def test_bad_consumers() -> None:
    """Fault K2: the name of a consumer is validated like all names."""
    with pytest.raises(InvalidInput, match=r"^consumer: "):
        MemoryBackend().subscribe(["k"], "\n")
