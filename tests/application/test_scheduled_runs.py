"""Schedules run the tasks of an application: on each kind of store, and in tests, which move the clock."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise

from taskqueue_core import Cron, Every, Instant, Schedule, Tasks
from taskqueue_worker.testing import TestQueue
from tests.application.running import OpenWorld, working
from tests.server.support import eventually

NINE = datetime(2026, 3, 28, 9, tzinfo=UTC).timestamp()


async def test_each_instant_runs_once_on_each_kind_of_store(world: OpenWorld) -> None:
    """U13, U14: a schedule that an application puts runs its task with the instant, once per instant."""
    tasks, seen = Tasks(prefix="shop."), list[datetime]()

    @tasks.task("tick")
    async def tick(at: datetime) -> None:
        seen.append(at)

    async with world() as it, tasks.connect(it.backend) as queue:
        schedule = Schedule(
            "tick", Every(1), tick.call(at=Instant), overlap="allow", catch_up="all"
        )
        await queue.schedules.put(schedule)
        async with working(it.worker(tasks)):
            await eventually(lambda: len(seen) >= 2)
        await queue.schedules.delete("tick")
    seen.sort()
    assert len(set(seen)) == len(seen)
    assert {(later - earlier).total_seconds() for earlier, later in pairwise(seen)} == {1}


def reports() -> Tasks:
    """Return a registry with a task that runs each night, and one that another schedule runs with its instant."""
    tasks = Tasks(prefix="shop.")

    @tasks.task("sweep", schedule=Cron("30 2 * * *", timezone="Europe/Berlin"))
    async def sweep(rooms: int = 3) -> int:
        return rooms

    @tasks.task("report")
    async def report(day: datetime, to: str) -> str:
        return f"{to} {day:%H:%M}"

    tasks.schedule("noon", report.call(Instant, to="ada"), Cron("@daily"))
    return tasks


async def test_time_travel_fires_schedules() -> None:
    """U11, U13, U14: `TestQueue` fires each instant at its time, through the change of the clock."""
    tasks = reports()
    async with TestQueue(tasks, start=NINE) as taskqueue:
        drained = await taskqueue.drain()
        assert drained.count() == 0
        drained = await taskqueue.advance(24 * 3600)
        assert drained.count("shop.sweep", end="done") == 1
        assert drained.count("shop.report", end="done") == 1
        report, sweep = tasks.functions["shop.report"], tasks.functions["shop.sweep"]
        midnight = datetime(2026, 3, 29, tzinfo=UTC)
        taskqueue.assert_published(report, times=1, day=midnight, to="ada")
        (published,) = taskqueue.published(sweep)
        # 02:30 does not exist in that night, so it was at 03:00, which is 01:00 UTC.
        assert published.task.id == "shop.sweep.2026-03-29T01:00:00Z"
        assert taskqueue.now == NINE + 24 * 3600
        drained = await taskqueue.advance(10 * 24 * 3600)
        assert drained.count("shop.sweep", end="done") == 10
        await taskqueue.queue.schedules.pause("shop.sweep")
        assert (await taskqueue.advance(24 * 3600)).count("shop.sweep") == 0


async def test_a_schedule_that_a_test_declares_or_puts_later_fires() -> None:
    """U11, U13: declarations are applied before each drain; a schedule at run time needs no apply."""
    tasks = reports()
    async with TestQueue(tasks, start=NINE) as taskqueue:
        report = tasks.functions["shop.report"]
        tasks.schedule("hourly", report.call(Instant, "bob"), Cron("@hourly"), overlap="allow")
        call = report.call(Instant, "eve")
        await taskqueue.queue.schedules.put(Schedule("half", Every(1800), call, overlap="allow"))
        await taskqueue.advance(3600)
        taskqueue.assert_published(report, times=1, to="bob")
        taskqueue.assert_published(report, times=2, to="eve")
