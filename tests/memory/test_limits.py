"""Queue limits in the memory backend: waiting for a limit is cheap, and no wake-up is missed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from tests.memory.test_wakeups import counted_looks, hop, stop, waiting


async def looks_during(
    monkeypatch: pytest.MonkeyPatch, steps: Callable[[], Awaitable[None]]
) -> int:
    """Return how often receives looked for work while ``steps`` ran."""
    looks = counted_looks(monkeypatch)
    await steps()
    await hop()
    return len(looks)


async def test_a_token_wakes_few_of_many(
    backend: MemoryBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5: of 100 receives waiting for a token, two wake when one is available.

    One takes the task, and the other waits for the next token.
    """
    limits = QueueSettings(rate_limit=RateLimit(max_tokens=1))
    await backend.control.configure("k", limits)
    receives = await waiting(*(backend.subscribe(["k"], f"w{n}") for n in range(100)))
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(50)))
    await hop()

    async def tokens_come() -> None:
        for _ in range(10):
            await clock.advance(1)

    assert sum(receive.done() for receive in receives) == 1
    assert await looks_during(monkeypatch, tokens_come) <= 20
    assert sum(receive.done() for receive in receives) == 11
    await stop(*receives)


async def test_a_place_wakes_one_of_many(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1, law 5: when a delivery in flight ends, one of 100 waiting receives wakes.

    A publish to the full queue wakes none.
    """
    await backend.control.configure("k", QueueSettings(max_inflight=1))
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(50)))
    first = backend.subscribe(["k"], "first")
    (delivery,) = (await first.receive(1, None)).deliveries
    receives = await waiting(*(backend.subscribe(["k"], f"w{n}") for n in range(100)))

    async def publish() -> None:
        await backend.publisher.publish(*(Task(key="k") for _ in range(50)))

    async def ack() -> None:
        await first.ack(delivery)

    assert await looks_during(monkeypatch, publish) == 0
    assert await looks_during(monkeypatch, ack) == 1
    assert sum(receive.done() for receive in receives) == 1
    await stop(*receives)


class PassingClock(ManualClock):
    """A clock that advances by ``step`` each time it is read."""

    step = 0.0

    def now(self) -> float:
        """Advance the clock and return its time."""
        self._now += self.step
        return self._now


@pytest.mark.parametrize("step", [0.05 * n for n in range(1, 20)])
async def test_a_limit_that_opens_between_the_look_and_the_wait_wakes(step: float) -> None:
    """F7, law 5: a token that becomes available between a receive's look for work and its wait wakes the receive."""
    clock = PassingClock()
    backend = MemoryBackend(clock=clock)
    await backend.control.configure("k", QueueSettings(rate_limit=RateLimit(max_tokens=1)))
    await backend.publisher.publish(Task.of("k"), Task.of("k"))
    subscription = backend.subscribe(["k"], "w")
    assert len((await subscription.receive(1, None)).deliveries) == 1
    clock.step = step
    receive = asyncio.ensure_future(subscription.receive(1, None))
    await hop()
    clock.step = 0.0
    await clock.advance(2)
    assert receive.done()
    assert len(receive.result().deliveries) == 1
    await backend.aclose()
