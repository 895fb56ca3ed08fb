"""Random histories of processes that fire the same schedules while calls fail and processes are killed."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest

from taskqueue_core.capabilities import Due, Fire, Fired, QueueSettings, StoredSchedule
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer import outage
from taskqueue_core.consumer.firing import fire_schedules
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.schedules import Every, Schedule, Spec, TaskTemplate
from taskqueue_core.tasks import Published
from taskqueue_memory import MemoryBackend

START = 1_800_000_000.0
PROCESSES, SCHEDULES, CAPACITY = 3, 40, 12
HISTORIES = int(os.environ.get("TASKQUEUE_FIRING_HISTORIES", "2"))


class Faulty:
    """The schedules as one process reaches them: calls are slow, fail, or lose their answers."""

    def __init__(self, history: History) -> None:
        self.history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self.history.backend.schedules, name)

    async def _go(self) -> None:
        chance = self.history.chance
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.05:
            raise BackendUnavailable("the call does not arrive")

    async def due(self, limit: int) -> Due:
        """Ask what is due; the answer may be late or lost."""
        await self._go()
        due = await self.history.backend.schedules.due(limit)
        await self._go()
        return due

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        """Fire, and note what the store did, whether or not the answer arrives."""
        await self._go()
        done = await self.history.backend.schedules.fire(*fires)
        for fire, fired in zip(fires, done, strict=True):
            self.history.note(fire, fired)
        if self.history.chance.random() < 0.05:
            raise PublishUnconfirmed("the answer is lost")
        return done


class Process:
    """What `fire_schedules` needs of a backend. Its own clock is up to an hour off."""

    def __init__(self, history: History) -> None:
        self.capabilities = history.backend.capabilities
        self.schedules = Faulty(history)
        self._history = history
        self._error = history.chance.uniform(-3600, 3600)

    def now(self) -> float:
        """Return a wrong time."""
        return self._history.clock.now() + self._error


class History:
    """One store, processes that come and go, and what they did."""

    def __init__(self, seed: int, seconds: int) -> None:
        self.seconds = seconds
        self.chance = random.Random(seed)
        self.clock = ManualClock(START)
        self.backend = MemoryBackend(clock=self.clock)
        self.fired = Counter[str]()
        self.refused = 0

    def note(self, fire: Fire, fired: Fired) -> None:
        """Count what became of the tasks of a step."""
        for run, answer in zip(fire.runs, fired.confirmations, strict=False):
            if answer.status is Published.REFUSED:
                self.refused += 1
            else:
                self.fired[run.task.id] += 1

    async def put(self, number: int) -> tuple[str, int]:
        """Put a schedule; return its name and interval. Some change while they fire."""
        name, every = f"s{number}", 1 + number % 5
        template = TaskTemplate(key=f"q{number % 3}", priority=self.chance.randrange(10))
        ends = datetime.fromtimestamp(START + self.seconds + 0.5, UTC)
        schedule = Schedule(
            name, Every(every), template, "all", late=100_000, overlap="allow", ends=ends
        )
        spec, now = Spec(schedule=schedule).encode(), self.clock.now()
        stored = StoredSchedule(
            key=template.key, name=name, spec=spec, next_at=now - now % every + every
        )
        await self.backend.schedules.put(stored, keep_next=True)
        return name, every

    async def consume(self) -> None:
        """Take and ack all tasks, so that queues have room again; an id may then be published again."""
        keys = [f"q{number}" for number in range(3)]
        async with self.backend.subscribe(keys, "c") as subscription:
            while (received := await subscription.receive(1000, 0)).deliveries:
                await subscription.ack(*received.deliveries)

    async def run(self) -> None:
        """Let time pass, with faults; then heal everything and wait until all instants have been fired."""
        await self.backend.control.configure(
            "q0", QueueSettings(capacity=CAPACITY, dedupe_window=0.0)
        )
        for key in ("q1", "q2"):
            await self.backend.control.configure(key, QueueSettings(dedupe_window=0.0))
        every = dict([await self.put(number) for number in range(SCHEDULES)])
        processes = [self.start() for _ in range(PROCESSES)]
        for _ in range(self.seconds):
            if self.chance.random() < 0.2:
                victim = self.chance.randrange(PROCESSES)
                processes[victim].cancel()
                processes[victim] = self.start()
            if self.chance.random() < 0.1:
                await self.put(self.chance.randrange(SCHEDULES))
            await self.clock.advance(1.0)
            await self.settle()
            if self.chance.random() < 0.4:
                await self.consume()
        await self.backend.control.configure(
            "q0", QueueSettings(version=1, capacity=None, dedupe_window=0.0)
        )
        expected = sum(self.seconds // interval for interval in every.values())
        for _ in range(60):
            await self.clock.advance(1.0)
            await self.settle()
        for process in processes:
            process.cancel()
        await asyncio.gather(*processes, return_exceptions=True)
        assert set(self.fired.values()) == {1}, "an instant was fired twice"
        assert self.fired.total() == expected, "an instant was lost"
        await self.backend.aclose()

    def start(self) -> asyncio.Task[Any]:
        """Start a process."""
        process: Any = Process(self)
        return asyncio.create_task(fire_schedules(process))

    async def settle(self) -> None:
        """Let the processes do what they can now."""
        for _ in range(40):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(4))
async def test_no_instant_is_lost_or_fired_twice(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """U13: with lost calls and answers, killed processes, wrong clocks, full queues and changes, each fires once."""
    await _history(seed, 60, monkeypatch, caplog)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 100 + HISTORIES))
async def test_histories_of_five_thousand_instants(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """U13: the same for long histories; `dev.py soak` runs twenty, with 100,000 instants in all."""
    assert await _history(seed, 300, monkeypatch, caplog) >= 5000


async def _history(
    seed: int, seconds: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> int:
    caplog.set_level("CRITICAL")
    monkeypatch.setattr(outage, "OUTAGE_BACKOFF", RetryPolicy(base=0.0, cap=0.0, jitter=0.0))
    history = History(seed, seconds)
    await history.run()
    assert history.refused
    return history.fired.total()
