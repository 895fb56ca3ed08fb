"""Limits of the flow: who waits for a place or a token costs nothing, and gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.flow import RateLimit
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from tests.memory.test_wakeups import (
    HISTORIES,
    KEYS,
    History,
    counted_looks,
    hop,
    stop,
    waiting,
)


async def looks_during(
    monkeypatch: pytest.MonkeyPatch, steps: Callable[[], Awaitable[None]]
) -> int:
    """How often receives looked for work while ``steps`` were done."""
    looks = counted_looks(monkeypatch)
    await steps()
    await hop()
    return len(looks)


async def test_a_token_wakes_few_of_many(
    backend: MemoryBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5: of a hundred that wait for a token two look when one comes: who takes it, and who waits for the next."""
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
    """B1, law 5: of a hundred that wait for a place one looks when one comes free, and none when a task comes."""
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


LIMITS: tuple[dict[str, Any], ...] = (
    {},
    {"max_inflight": 1},
    {"max_inflight": 2, "rate_limit": RateLimit(max_tokens=2, interval=4)},
    {"rate_limit": RateLimit(max_tokens=1)},
    {"paused": True},
)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from("abc")),
        st.tuples(st.just("publish"), st.sampled_from("abc")),
        st.tuples(st.just("receive"), st.integers(0, 3)),
        st.tuples(st.just("receive"), st.integers(0, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
        st.tuples(st.just("close"), st.integers(0, 3)),
        st.tuples(st.just("hand_back"), st.integers(0, 3)),
        st.tuples(st.just("ack"), st.integers(0, 3)),
        st.tuples(st.just("hop"), st.just(0)),
        st.tuples(st.just("limit"), st.tuples(st.sampled_from("abc"), st.sampled_from(LIMITS))),
        st.tuples(st.just("advance"), st.sampled_from([0.5, 1.0, 3.0])),
    ),
    max_size=60,
)


class LimitedHistory(History):
    """One in which limits come and go, and time passes."""

    async def ack(self, number: int) -> None:
        """Settle all."""
        for record in list(self.subscriptions[number].owned.values()):
            await self.subscriptions[number].ack(record.delivery)

    async def limit(self, what: tuple[str, dict[str, Any]]) -> None:
        """Put other limits in force."""
        key, limits = what
        present = await self.backend.control.settings(key)
        changed = QueueSettings(version=present.version, **limits)
        await self.backend.control.configure(key, changed)

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        clock = self.backend._store.clock
        assert isinstance(clock, ManualClock)
        await clock.advance(seconds)

    def check(self) -> None:
        """Nobody may wait while there is work that may be had."""
        for number, receive in self.receives.items():
            for key in KEYS[number]:
                queue = self.backend._store.queue(key)
                if not receive.done() and queue.states[State.WAITING]:
                    assert not queue.room(self.backend.now()).left, f"{number} sleeps on {key}"


@settings(max_examples=HISTORIES, deadline=None)
@given(moves)
async def test_nobody_waits_while_there_is_room(steps: list[tuple[str, Any]]) -> None:
    """Fault E4, laws 5, 9: after any history who waits has nothing to take, then and when tokens come by themselves."""
    history = LimitedHistory()
    for move, what in steps:
        await getattr(history, move)(what)
    for _ in range(6):
        await hop()
        history.check()
        await history.advance(0.5)
    await history.backend.aclose()
    await hop()


class PassingClock(ManualClock):
    """Time passes between any two looks at the clock."""

    step = 0.0

    def now(self) -> float:
        """Return Unix seconds, and let some pass."""
        self._now += self.step
        return self._now


@pytest.mark.parametrize("step", [0.05 * n for n in range(1, 20)])
async def test_a_limit_that_opens_between_the_look_and_the_wait_wakes(step: float) -> None:
    """F7, law 5: the look finds no room and the wait begins after there is: it must not go on for ever."""
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
