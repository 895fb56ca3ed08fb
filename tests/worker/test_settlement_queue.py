"""The settlement queue settles outcomes in rounds, and reads the settings of each queue once per round."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.consumer import outage
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.consumer.settlement_queue import SettlementQueue
from taskqueue_core.errors import BackendUnavailable, SubscriptionClosed, TaskQueueError
from taskqueue_core.retry import (
    Failed,
    HandBack,
    Outcome,
    Rejected,
    RetryLater,
    RetryPolicy,
    Success,
)
from taskqueue_core.tasks import Delivery, State
from taskqueue_memory import MemoryBackend
from tests.worker.fake import PATIENCE
from tests.worker.local import publish, status, until

MAX_UNSETTLED = 10


class Bench:
    """A settlement queue on a memory backend whose calls are counted and can fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backend = MemoryBackend()
        self.control = control_of(self.backend)
        self.subscription = self.backend.subscribe(["work", "other"], "w")
        self.results: dict[str, bool] = {}
        self.rounds = 0
        self.calls: Counter[str] = Counter()
        self.errors: dict[str, list[TaskQueueError]] = {}
        """exceptions that the next calls of a method raise, by method name"""
        self.most_in_flight = self._in_flight = 0
        for owner, name in (
            (self.control, "settings"),
            (self.backend.publisher, "schedule_retry"),
            (self.subscription, "ack"),
            (self.subscription, "redeliver"),
            (self.subscription, "dead_letter"),
        ):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))
        monkeypatch.setattr(outage, "OUTAGE_BACKOFF", RetryPolicy(base=0, cap=0))
        self.queue = SettlementQueue(
            self.backend, self.subscription, OutageRetry(self._outage), self._report, MAX_UNSETTLED
        )

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def counted(*args: Any, **more: Any) -> Any:
            self.calls[name] += 1
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            try:
                await asyncio.sleep(0)
                if errors := self.errors.get(name):
                    raise errors.pop()
                return await call(*args, **more)
            finally:
                self._in_flight -= 1

        return counted

    async def _outage(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - OutageRetry passes it by position
        pass

    async def _report(self, results: dict[str, bool]) -> None:
        self.rounds += 1
        self.results |= results

    async def receive(self, count: int, key: str = "work") -> list[Delivery]:
        """Publish tasks and receive them."""
        await publish(self.backend, *range(count), key=key)
        received: list[Delivery] = []
        while len(received) < count:
            received += (await self.subscription.receive(100, 0)).deliveries
        return received

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the settlement queue; at the end of the block, wait until everything is settled."""
        task = asyncio.create_task(self.queue.run())
        try:
            yield task
            await self.queue.finish(PATIENCE)
            await asyncio.sleep(0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A settlement queue for one test."""
    return Bench(monkeypatch)


async def test_one_round_reads_the_settings_of_a_queue_once(bench: Bench) -> None:
    """Law 9: a round reads the settings of each queue once, so that a change applies to the next round."""
    *first, last = await bench.receive(101)
    async with bench.running():
        for delivery in first:
            bench.queue.put((delivery, Failed("x")))
        await until(lambda: len(bench.results) == 100)
        assert (bench.calls["settings"], bench.calls["schedule_retry"], bench.rounds) == (1, 100, 1)
        await bench.control.configure("work", QueueSettings(retry=RetryPolicy(max_attempts=1)))
        bench.queue.put((last, RetryLater(60.0)))
    assert (bench.calls["settings"], bench.calls["schedule_retry"], bench.rounds) == (2, 100, 2)
    assert (await status(bench.backend, last.task.id)).state is State.DEAD
    assert all(bench.results.values())


async def test_one_round_settles_every_kind_of_outcome(bench: Bench) -> None:
    """In one round, acks and releases take one call each.

    Settings are read once per queue, and only for outcomes that need the retry policy.
    """
    work, other = await bench.receive(6), await bench.receive(2, "other")
    await bench.subscription.ack(work[5])
    bench.calls.clear()
    outcomes: list[tuple[Delivery, Outcome]] = [
        *((delivery, Success(b"1")) for delivery in work[:2]),
        *((delivery, HandBack()) for delivery in work[2:4]),
        (work[4], Failed("x")),
        (work[5], Failed("too late")),
        (other[0], Failed("x")),
        (other[1], Rejected("bad")),
    ]
    async with bench.running():
        for delivery, outcome in outcomes:
            bench.queue.put((delivery, outcome))
    assert bench.calls == {
        "ack": 1, "redeliver": 1, "settings": 2, "schedule_retry": 3, "dead_letter": 1
    }  # fmt: skip
    assert bench.results == {delivery.receipt: delivery != work[5] for delivery in work + other}
    assert (bench.rounds, bench.queue.unsettled) == (1, 0)


async def test_dead_letters_read_no_settings(bench: Bench) -> None:
    """A rejected task becomes a dead letter without reading settings, because the retry policy does not apply."""
    (delivery,) = await bench.receive(1)
    async with bench.running():
        bench.queue.put((delivery, Rejected("bad")))
    assert bench.calls == {"dead_letter": 1}


async def test_a_hundred_retries_at_a_time(bench: Bench) -> None:
    """At most a hundred retries are sent at once, because more would only fill the connection of the store."""
    deliveries = await bench.receive(250)
    async with bench.running():
        for delivery in deliveries:
            bench.queue.put((delivery, Failed("x")))
    assert (bench.calls["settings"], bench.calls["schedule_retry"]) == (1, 250)
    assert bench.most_in_flight == 100
    assert bench.results == {delivery.receipt: True for delivery in deliveries}


async def test_an_outage_settles_nothing_twice(bench: Bench) -> None:
    """After an outage, failed calls are repeated with settings that are read again.

    Calls that succeeded are not repeated.
    """
    deliveries = await bench.receive(20)
    bench.errors = {
        "settings": [BackendUnavailable("away")],
        "schedule_retry": [BackendUnavailable("away")] * 5,
        "ack": [BackendUnavailable("away")],
    }
    async with bench.running():
        for delivery in deliveries[:10]:
            bench.queue.put((delivery, Failed("x")))
        for delivery in deliveries[10:]:
            bench.queue.put((delivery, Success()))
    assert bench.calls == {"settings": 3, "schedule_retry": 15, "ack": 2}
    assert bench.results == {delivery.receipt: True for delivery in deliveries}


async def test_an_error_ends_it_and_leaves_no_waiter(bench: Bench) -> None:
    """An unexpected error of the store ends `run`, and ends all waits for capacity or for the end."""
    deliveries = await bench.receive(MAX_UNSETTLED + 1)
    bench.errors = {"ack": [SubscriptionClosed("closed")]}
    async with asyncio.timeout(PATIENCE), bench.running() as task:
        for delivery in deliveries:
            bench.queue.put((delivery, Success()))
        await asyncio.gather(bench.queue.room(), bench.queue.finish())
        with pytest.raises(SubscriptionClosed):
            await task
    assert bench.queue.unsettled == MAX_UNSETTLED + 1


@pytest.mark.parametrize(
    ("count", "outcome"),
    [
        (MAX_UNSETTLED + 1, Success(b"1")),
        (2, Success(b"1" * 2_100_000)),
        (2, Failed("x" * 2_100_000)),
        (2, RetryLater(1.0, "x" * 2_100_000)),
        (2, Rejected("x" * 2_100_000)),
    ],
)
async def test_room(bench: Bench, count: int, outcome: Outcome) -> None:
    """The queue has no capacity while too many outcomes, or too many bytes of results or texts, are unsettled (A5)."""
    deliveries = await bench.receive(count)
    for delivery in deliveries:
        await asyncio.wait_for(bench.queue.room(), PATIENCE)
        bench.queue.put((delivery, outcome))
    waiting = asyncio.create_task(bench.queue.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    async with asyncio.timeout(PATIENCE), bench.running():
        await waiting


async def test_waiting_for_the_end_has_an_end(bench: Bench) -> None:
    """If the store stays unavailable, `finish` returns after its timeout."""
    (delivery,) = await bench.receive(1)
    bench.queue.put((delivery, Success()))
    await asyncio.wait_for(bench.queue.finish(0.01), PATIENCE)
    assert bench.queue.unsettled == 1
