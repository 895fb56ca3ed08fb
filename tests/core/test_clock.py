"""The system clock, which never goes back, and the manual clock, which moves only when a test advances it."""

import asyncio
import time
from functools import partial

import pytest

from taskqueue_core.clock import ManualClock, SystemClock


def test_steps_of_the_wall_clock_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 8: when the wall clock is set back or forward, the store's time continues undisturbed."""
    clock = SystemClock()
    before = clock.now()
    for step in (-86_400, 86_400):
        monkeypatch.setattr(time, "time", lambda step=step: before + step)
        assert 0 <= clock.now() - before < 3600


def test_system_time_is_unix_time() -> None:
    """The system clock returns Unix time, as other programs see it."""
    before = time.time()
    now = SystemClock().now()
    assert before - 0.1 < now < time.time() + 0.1


def test_system_time_never_goes_backwards() -> None:
    """Each reading of the system clock is at least as high as the one before."""
    clock = SystemClock()
    readings = [clock.now() for _ in range(10_000)]
    assert readings == sorted(readings)


async def test_calls_come_at_their_time() -> None:
    """A scheduled call is made once and not before its time; if its time has already passed, it is made at once."""
    clock = SystemClock()
    done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    at = clock.now() + 0.02
    clock.call_at(at, lambda: done.set_result(clock.now()))
    late = asyncio.Event()
    clock.call_at(at - 1e9, late.set)
    await asyncio.wait_for(late.wait(), 30)
    assert await asyncio.wait_for(done, 30) >= at - 0.002


async def test_a_cancelled_call_is_not_made() -> None:
    """A cancelled call is never made, and cancelling it again has no effect."""
    calls: list[int] = []
    for clock in (SystemClock(), ManualClock()):
        timer = clock.call_at(clock.now() + 0.01, lambda: calls.append(1))
        timer.cancel()
        timer.cancel()
        if isinstance(clock, ManualClock):
            await clock.advance(1)
        else:
            await asyncio.sleep(0.03)
    assert calls == []


async def test_manual_time() -> None:
    """A manual clock moves only when a test advances it.

    It makes scheduled calls in the order of their times, each at its own time.
    """
    clock = ManualClock(100)
    calls: list[tuple[str, float]] = []

    def call(name: str) -> None:
        calls.append((name, clock.now()))
        if name == "a":
            clock.call_at(103, lambda: call("from a"))
            clock.call_at(50, lambda: call("late"))

    for name, at in (("b", 104), ("a", 102), ("c", 104), ("d", 200)):
        clock.call_at(at, partial(call, name))
    assert clock.now() == 100
    await clock.advance(10)
    assert calls == [("a", 102), ("late", 102), ("from a", 103), ("b", 104), ("c", 104)]
    assert clock.now() == 110


async def test_advancing_lets_woken_tasks_run() -> None:
    """When ``advance`` returns, the coroutines woken by its calls have already run."""
    clock = ManualClock()
    event = asyncio.Event()
    clock.call_at(clock.now() + 1, event.set)
    woken = asyncio.ensure_future(event.wait())
    await clock.advance(1)
    assert woken.done()
