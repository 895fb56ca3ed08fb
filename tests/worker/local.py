"""Helpers that run a local worker in the event loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from taskqueue_core import Queue, Task
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_core.tasks import Ledger, TaskStatus
from taskqueue_worker import LocalWorker
from tests.worker.fake import PATIENCE


@asynccontextmanager
async def serving(worker: LocalWorker) -> AsyncIterator[asyncio.Task[None]]:
    """Run a worker and yield its task; a test that expects an error must check it."""
    task = asyncio.create_task(worker.serve())
    try:
        yield task
    finally:
        worker.stop(now=True)
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.done()


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - no event signals an arbitrary condition
            await asyncio.sleep(0.001)


async def ledger_when(
    backend: Backend, condition: Callable[[Ledger], object], key: str = "work"
) -> Ledger:
    """Return the ledger of the queue once a condition is true; the ledger must balance at every read."""
    async with asyncio.timeout(PATIENCE):
        while True:
            ledger = await control_of(backend).ledger(key)
            assert ledger.balanced
            if condition(ledger):
                return ledger
            await asyncio.sleep(0.001)


async def publish(backend: Backend, *payloads: object, key: str = "work") -> list[str]:
    """Publish a task for each payload; return their ids."""
    tasks = [Task.of(key, payload) for payload in payloads]
    await Queue(backend).publish_many(tasks)
    return [task.id for task in tasks]


async def status(backend: Backend, task_id: str, key: str = "work") -> TaskStatus:
    """Return the status of a task, which must exist."""
    (found,) = await control_of(backend).statuses(key, task_id)
    assert found is not None
    return found
