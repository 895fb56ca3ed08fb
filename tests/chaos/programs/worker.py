"""A worker connected over a WebSocket, which records what it executes."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from pathlib import Path

from taskqueue_core import Tasks
from taskqueue_worker import Context, Reject, Retry, Worker
from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup

_CONCURRENCY = 20
_CHILDREN = 2
"""maximum number of child processes of a worker"""


def _first(mark: Path) -> bool:
    """Return whether no process has left this mark before, and leave it. A redrive does not show in a delivery."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _registries(setup: Setup) -> tuple[Tasks, ...]:
    """Return the tasks of steps in a run in which steps add steps."""
    if not setup.steps:
        return ()
    os.environ |= {"CHAOS_FOLDER": str(Path(setup.log).parent), "CHAOS_NAME": setup.name}
    steps = importlib.import_module("tests.chaos.programs.steps")
    if setup.steps == "process":
        return (steps.isolated,)
    steps.record(f"{setup.name}.steps")
    return (steps.threaded,)


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Run the worker until told to stop."""
    chance = random.Random(f"{setup.seed} {setup.name}")
    concurrency = _CHILDREN if setup.steps == "process" else _CONCURRENCY
    worker = Worker(
        *_registries(setup),
        url=os.environ["TASKQUEUE_SERVER_URL"],
        worker_id=f"w{setup.number}",
        concurrency=concurrency,
        prefetch=concurrency,
        grace=2.0,
    )

    async def handle(will: str, padding: str, context: Context) -> str:
        """Execute a task and end it as the task asks: success, retry or reject."""
        del padding
        log.note(
            What.EXECUTED,
            key=context.key,
            task=context.task_id,
            attempt=context.attempt,
            losses=context.losses,
            receipt=context._delivery.receipt,
        )
        await asyncio.sleep(chance.uniform(0, setup.hold))
        if will == "retry" and context.attempt == 1:
            raise Retry(chance.uniform(0.05, 0.3))
        if will == "bury" and context._delivery.prior == 0:
            raise Reject("on purpose")
        if will == "bury once" and _first(Path(setup.log).parent / f"buried-{context.task_id}"):
            raise Reject("on purpose")
        return context.task_id

    for key in setup.keys if not setup.steps else ("delta",):
        worker.task(key)(handle)
    serving = asyncio.create_task(worker.serve())
    ending = asyncio.create_task(over.wait())
    await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    worker.stop()
    await serving
