"""Workflows and schedules of this project, on its Redis backend.

A server publishes the steps of workflows and fires schedules, and so does each local worker.
"""

from __future__ import annotations

import asyncio
import os
import sys

from flow import BROKER, effect, main

from taskqueue_core import Cron, Tasks, chain
from taskqueue_core import group as group_of

os.environ.update(TASKQUEUE_BACKEND="redis", TASKQUEUE_REDIS_URL=BROKER)
tasks = Tasks()


@tasks.task
async def step(name: str, pause: float) -> None:
    """Run one step of a chain."""
    effect("step", name, pause)


@tasks.task
async def member(name: str, pause: float) -> None:
    """Run one member of a group."""
    effect("member", name, pause)


@tasks.task
async def done() -> None:
    """Run once all members are done."""
    effect("callback", 0)


@tasks.task
async def tick(name: str) -> None:
    """Run the task of a schedule."""
    effect("tick", name)


def prepare(number: float) -> None:
    """Put the schedules into the store."""

    async def run() -> None:
        for n in range(int(number)):
            tasks.schedule(f"s{n}", tick.call(f"s{n}"), Cron("* * * * *"), overlap="allow")
        async with tasks.connect("redis"):
            await tasks.apply()

    asyncio.run(run())


def worker() -> None:
    """Run a local worker for two tasks at a time."""
    from taskqueue_worker import LocalWorker  # noqa: PLC0415 - after the environment is set

    asyncio.run(LocalWorker(tasks, backend="redis", concurrency=2).serve())


def scheduler(number: float) -> None:  # noqa: ARG001 - the store has the schedules
    """Run a server."""
    words = [sys.executable, "-m", "taskqueue_cli", "serve", "--port", "0"]
    os.execv(sys.executable, words)  # noqa: S606 - the program is this Python


def chains(number: float, steps: float, pause: float) -> None:
    """Publish chains."""

    async def run() -> None:
        async with tasks.connect("redis"):
            for n in range(int(number)):
                calls = [step.call(f"{n}.{m}", pause) for m in range(int(steps))]
                await chain(*calls).publish()

    asyncio.run(run())


def group(members: float, pause: float) -> None:
    """Publish a group with a callback."""

    async def run() -> None:
        async with tasks.connect("redis"):
            calls = [member.call(str(n), pause) for n in range(int(members))]
            await group_of(*calls, then=done.call()).publish()

    asyncio.run(run())


if __name__ == "__main__":
    main(prepare=prepare, worker=worker, scheduler=scheduler, chains=chains, group=group)
