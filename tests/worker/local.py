"""A local worker beside the test, in the same event loop."""

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
    """Run a worker; the test has to look at how its task ends, where that matters."""
    task = asyncio.create_task(worker.serve())
    try:
        yield task
    finally:
        worker.stop(now=True)
        await asyncio.wait([task], timeout=PATIENCE)
        assert task.done()


async def until(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - whatever the test looks at rings no bell
            await asyncio.sleep(0.001)


async def ledger_when(
    backend: Backend, condition: Callable[[Ledger], object], key: str = "work"
) -> Ledger:
    """Return the queue's ledger once it is so; it must balance at every look."""
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
    """Return what is known of a task."""
    (found,) = await control_of(backend).statuses(key, task_id)
    assert found is not None
    return found
