"""The scheduler of taskiq, with its stream broker. It has neither chains nor groups of its own."""

from __future__ import annotations

import asyncio

from flow import BROKER, effect, main
from taskiq import TaskiqScheduler
from taskiq.api import run_receiver_task
from taskiq.cli.scheduler.run import SchedulerLoop
from taskiq.schedule_sources import LabelScheduleSource
from taskiq_redis import RedisStreamBroker

IDLE = 10_000
"""milliseconds after which a message of a dead worker is delivered again; the default is ten minutes"""
broker = RedisStreamBroker(BROKER, idle_timeout=IDLE, unacknowledged_batch_size=100)


async def tick(name: str) -> None:
    """Run the task of a schedule."""
    effect("tick", name)


def worker() -> None:
    """Run a worker."""

    async def run() -> None:
        broker.register_task(tick, task_name="tick")
        await run_receiver_task(broker, run_startup=True, max_async_tasks=2)

    asyncio.run(run())


def scheduler(number: float) -> None:
    """Run the scheduler, with the schedules as labels of the task."""

    async def run() -> None:
        schedules = [{"cron": "* * * * *", "args": [f"s{n}"]} for n in range(int(number))]
        broker.register_task(tick, task_name="tick", schedule=schedules)
        source = LabelScheduleSource(broker)
        await source.startup()
        found = TaskiqScheduler(broker, [source])
        await found.startup()
        await SchedulerLoop(found).run(skip_first_run=True)  # else not at the minute

    asyncio.run(run())


if __name__ == "__main__":
    main(worker=worker, scheduler=scheduler)
