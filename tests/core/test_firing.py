"""The loop that fires schedules, on the memory backend with a clock of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskqueue_core.capabilities import Due, Fire, Fired, QueueSettings, StoredSchedule
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer import outage
from taskqueue_core.consumer.firing import fire_schedules
from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.schedules import Every, Schedule, Spec, TaskTemplate
from taskqueue_memory import MemoryBackend

START = 1_800_000_000.0


class Bench:
    """A memory backend with a clock that the test advances, and loops that fire its schedules."""

    def __init__(self) -> None:
        self.clock = ManualClock(START)
        self.backend = MemoryBackend(clock=self.clock)
        self.loops: list[asyncio.Task[Any]] = []

    def start(self, backend: Any = None) -> None:
        """Start a loop."""
        self.loops.append(asyncio.create_task(fire_schedules(backend or self.backend)))

    async def put(self, name: str, every: float, **fields: Any) -> StoredSchedule:
        """Put a schedule whose first instant is one interval after now."""
        now = self.clock.now()
        next_at = fields.pop("next_at", now + every)
        schedule = Schedule(name, Every(every), TaskTemplate(key="q"), overlap="allow", **fields)
        text = Spec(schedule=schedule).encode()
        stored = StoredSchedule(key="q", name=name, spec=text, next_at=next_at)
        return await self.backend.schedules.put(stored)

    async def pass_time(self, seconds: float, step: float = 1.0) -> None:
        """Advance the clock, in steps after which the loops have done what is due."""
        for _ in range(round(seconds / step)):
            await self.clock.advance(step)
            await self.settle()

    async def settle(self) -> None:
        """Let the loops do what is due."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def published(self, key: str = "q") -> int:
        """Return the number of tasks published so far."""
        return (await self.backend.control.ledger(key)).published

    async def recent(self, name: str) -> list[str]:
        """Return the results of the last instants of a schedule."""
        stored = await self.backend.schedules.get(name)
        assert stored is not None
        return [one.result for one in stored.recent]


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """Yield a bench; cancel its loops at the end."""
    monkeypatch.setattr(outage, "OUTAGE_BACKOFF", RetryPolicy(base=0.0, cap=0.0, jitter=0.0))
    bench = Bench()
    yield bench
    for loop in bench.loops:
        loop.cancel()
    done = await asyncio.gather(*bench.loops, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in done), "the loop ends by itself"
    await bench.backend.aclose()


async def test_each_instant_is_fired_once(bench: Bench) -> None:
    """U13: three loops fire each instant of each schedule once, without a leader."""
    for _ in range(3):
        bench.start()
    for number in range(30):
        await bench.put(f"s{number}", 1 + number % 5)
    await bench.pass_time(60)
    expected = sum(60 // (1 + number % 5) for number in range(30))
    assert await bench.published() == expected


async def test_a_put_wakes_the_loop(bench: Bench) -> None:
    """U13: the loop sleeps until the nearest instant, and a schedule that fires earlier ends its sleep."""
    bench.start()
    await bench.put("later", 3600)
    await bench.settle()
    await bench.put("soon", 2)
    await bench.pass_time(2.1, 0.7)
    assert await bench.recent("soon") == ["accepted"]


async def test_missed_instants_are_made_up_for(bench: Bench) -> None:
    """U13: what was missed while nothing ran is made up for in steps of limited size; the rest is skipped."""
    await bench.put("all", 1, catch_up="all", late=10_000)
    await bench.put("last", 1, catch_up="last")
    await bench.put("none", 1, catch_up="none")
    await bench.clock.advance(3000.5)
    bench.start()
    await bench.settle()
    assert await bench.recent("last") == ["missed", "accepted"]
    assert await bench.recent("none") == ["missed", "accepted"]
    assert await bench.published() == 1000 + 1 + 1
    assert await bench.recent("all") == ["accepted"] * 20


async def test_full_queue(bench: Bench) -> None:
    """U13: a refused instant is tried again until it is late, then it is skipped, with the reason of the queue."""
    await bench.backend.control.configure("q", QueueSettings(capacity=1))
    await bench.put("a", 1000, late=20)
    await bench.put("b", 1000, late=20)
    bench.start()
    await bench.pass_time(1010)
    assert sorted([await bench.recent("a"), await bench.recent("b")]) == [[], ["accepted"]]
    await bench.pass_time(20)
    assert sorted([await bench.recent("a"), await bench.recent("b")]) == [
        ["accepted"],
        ["queue_full"],
    ]
    assert await bench.published() == 1


async def test_refused_schedules_hide_no_others(bench: Bench) -> None:
    """U13: schedules of a full queue, however many, do not keep others from being fired."""
    await bench.backend.control.configure("q", QueueSettings(intake_paused=True))
    for number in range(250):
        await bench.put(f"s{number}", 1000)
    template = TaskTemplate(key="other")
    schedule = Schedule("other", Every(1000), template, overlap="allow")
    stored = StoredSchedule(
        key="other", name="other", spec=Spec(schedule=schedule).encode(), next_at=START + 1001
    )
    await bench.backend.schedules.put(stored)
    bench.start()
    await bench.pass_time(1003)
    assert await bench.published("other") == 1
    assert await bench.published() == 0


async def test_a_schedule_that_cannot_be_read(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """U13: a schedule that this version cannot read stays as it is, is reported once, and hides no others."""
    stored = StoredSchedule(key="q", name="newer", spec=b'{"v":9}', next_at=START + 1)
    stored = await bench.backend.schedules.put(stored)
    await bench.put("known", 2)
    bench.start()
    await bench.pass_time(10)
    assert await bench.backend.schedules.get("newer") == stored
    assert await bench.published() == 5
    assert [record.message for record in caplog.records] == ["a schedule cannot be fired here"]


class _Failing:
    """Schedules that fail in the middle of an outage: before the call, or after it, so that the answer is lost."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.down = False
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bench.backend.schedules, name)

    async def due(self, limit: int) -> Due:
        self.calls += 1
        if self.down:
            raise BackendUnavailable("down")
        return await self.bench.backend.schedules.due(limit)

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        done = await self.bench.backend.schedules.fire(*fires)
        if self.calls % 2:
            raise BackendUnavailable("the answer was lost")
        return done


class _Backend:
    """The backend of a bench with other schedules."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.schedules = _Failing(bench)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bench.backend, name)


async def test_outage_and_lost_answers(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """U13: after an outage the loop continues; an instant whose answer was lost is not fired again."""
    backend = _Backend(bench)
    bench.start(backend)
    await bench.put("s", 1, catch_up="all")
    await bench.pass_time(10)
    assert await bench.published() == 10
    backend.schedules.down = True
    await bench.pass_time(10)
    assert await bench.published() == 10
    backend.schedules.down = False
    await bench.pass_time(5)
    assert await bench.published() == 25
    assert len(caplog.records) < 20


async def test_clock_of_the_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """U13: a process whose clock is an hour off fires by the time of the store."""
    backend: Any = _Backend(bench)
    for error in (-3600.0, 3600.0):
        monkeypatch.setattr(backend, "now", lambda e=error: bench.clock.now() + e, raising=False)
        bench.start(backend)
    await bench.put("s", 10)
    await bench.pass_time(9)
    assert await bench.published() == 0
    await bench.pass_time(51)
    assert await bench.published() == 6


async def test_maintenance_fires() -> None:
    """U13: the maintenance of a server or a local worker fires schedules, and ends when it is cancelled."""
    bench = Bench()
    maintenance = asyncio.create_task(run_maintenance(bench.backend))
    await bench.put("s", 1)
    await bench.pass_time(3)
    assert await bench.published() == 3
    maintenance.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await maintenance
    await bench.pass_time(3)
    assert await bench.published() == 3
    await bench.backend.aclose()
