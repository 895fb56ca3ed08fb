"""The websocket worker with a real server on the memory backend."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from taskqueue_core import Queue, Task
from taskqueue_core.assembly import open_backend
from taskqueue_core.capabilities import QueueSettings, control_of
from taskqueue_core.config import Settings
from taskqueue_core.tasks import Ledger
from taskqueue_server import ServerProcess
from taskqueue_worker import Context, Worker
from taskqueue_worker.server_link import ServerLink
from tests.worker.fake import PATIENCE, running
from tests.worker.local import until
from tests.worker.processes import program


@asynccontextmanager
async def serving(*, lease: float = 15.0, grace: float = 0.5) -> AsyncIterator[tuple[Queue, str]]:
    """Run a server in this event loop; yield its queue and its URL."""
    settings = Settings(port=0, lease=lease, grace=grace, drain=1.0)
    backend = open_backend("taskqueue_memory", settings)
    server = ServerProcess(backend, settings)
    running_server = asyncio.create_task(server.run())
    await server.ready.wait()
    try:
        yield Queue(backend), server.url
    finally:
        server.stop()
        await running_server


async def ended(queue: Queue, count: int) -> Ledger:
    """Wait until ``count`` tasks are done or dead; return the ledger, which must balance at every read."""
    async with asyncio.timeout(PATIENCE):
        while True:
            ledger = await queue.ledger()
            assert ledger.balanced
            if ledger.done + ledger.dead >= count:
                return ledger
            await asyncio.sleep(0.01)


def break_connection(worker: Worker) -> None:
    """Break the connection of the worker from its own side while it has a frame to send."""
    link = worker._current_run and worker._current_run._source
    if isinstance(link, ServerLink):

        def cut() -> None:
            if link._connection:
                link._connection.abort()
                link._session.ping()
                link._connection.has_outgoing.set()

        with contextlib.suppress(RuntimeError):
            link._loop.call_soon_threadsafe(cut)


async def test_many_tasks_of_every_kind() -> None:
    """D5: each task runs once and ends in the state of its outcome."""
    async with serving() as (queue, url):
        worker = Worker(url=url, concurrency=100)
        runs: Counter[str] = Counter()

        @worker.task("async")
        async def one(n: int) -> int:
            runs["async"] += 1
            return n

        @worker.task("sync")
        def two(n: int, context: Context) -> str:
            runs["sync"] += 1
            return f"{n} {context.attempt}"

        tasks = [Task.of(key, {"n": n}) for n in range(500) for key in ("async", "sync")]
        tasks.append(Task.of("sync", {"n": "secret"}, id="bad"))
        await queue.publish_many(tasks)
        async with running(worker):
            ledger = await ended(queue, len(tasks))
        assert (ledger.done, ledger.dead) == (1000, 1)
        assert runs == {"async": 500, "sync": 500}
        assert await queue.result("sync", tasks[1].id) == "0 1"
        status = await queue.status("sync", "bad")
        assert status is not None
        assert status.error == "invalid_payload"


@pytest.mark.parametrize("cuts", [6, pytest.param(20, marks=pytest.mark.long)])
async def test_broken_connections_repeat_nothing_and_lose_nothing(cuts: int) -> None:
    """Fault E5, fault A2: after many broken connections, no task is lost and adopted tasks run only once."""
    async with serving(grace=2.0) as (queue, url):
        worker = Worker(url=url, concurrency=20, uniform=lambda: 0.0)
        runs: Counter[int] = Counter()

        @worker.task("work")
        async def act(n: int) -> int:
            runs[n] += 1
            await asyncio.sleep(0.02)
            return n

        def more_than(number: int) -> bool:
            return len(runs) > number

        tasks = [Task.of("work", {"n": n}) for n in range(50 * cuts)]
        await queue.publish_many(tasks)
        async with running(worker):
            for n in range(cuts):
                await until(partial(more_than, 40 * n))
                break_connection(worker)
            ledger = await ended(queue, len(tasks))
        assert ledger.done == len(tasks)
        assert set(runs) == set(range(len(tasks)))
        # A delivery that was lost in transit was never run, so its second delivery is not a repeat.
        assert set(runs.values()) == {1}
        stats = await control_of(queue.backend).stats("work")
        assert stats.retried == 0


async def test_a_blocked_loop_is_no_lost_worker() -> None:
    """Fault A5: a handler that blocks the event loop for two leases keeps its task, which does not count as lost."""
    async with serving(lease=0.6) as (queue, url):
        worker = Worker(url=url)
        runs = []

        @worker.task("work")
        async def block(context: Context) -> None:
            runs.append((context.attempt, context.losses))
            end = time.perf_counter() + 1.3
            while time.perf_counter() < end:
                sum(range(1000))

        await queue.publish("work")
        async with running(worker):
            ledger = await ended(queue, 1)
        assert ledger.done == 1
        assert runs == [(1, 0)]


async def test_a_task_that_kills_its_workers_ends_among_the_dead() -> None:
    """Fault A11: a task that repeatedly exits its worker becomes a dead letter after the maximum number of losses."""
    async with serving(grace=0.05) as (queue, url):
        control = control_of(queue.backend)
        await control.configure("sys.exit", QueueSettings(max_losses=1))
        await queue.publish("sys.exit", id="poison")
        for _ in range(2):
            async with program(url) as child, asyncio.timeout(PATIENCE):
                assert await child.wait() == 7
        ledger = await ended(queue, 1)
        assert ledger.dead == 1
        status = await queue.status("sys.exit", "poison")
        assert status is not None
        assert status.attempt == 1


async def test_a_stopping_worker_releases_tasks_for_the_next() -> None:
    """REV-E3: a task that a stopping worker releases is delivered to another worker at once, with the same attempt."""
    async with serving() as (queue, url):
        seen = []
        gate = threading.Event()
        first, second = Worker(url=url, grace=0.0), Worker(url=url)

        @first.task("work")
        async def sleep(context: Context) -> None:
            seen.append((1, context.attempt, context.losses))
            gate.set()
            await asyncio.sleep(60)

        @second.task("work")
        async def act(context: Context) -> None:
            seen.append((2, context.attempt, context.losses))

        await queue.publish("work")
        async with running(first):
            assert await asyncio.to_thread(gate.wait, 30)
            first.stop()
            async with running(second):
                ledger = await ended(queue, 1)
        assert ledger.done == 1
        assert seen == [(1, 1, 0), (2, 1, 0)]
