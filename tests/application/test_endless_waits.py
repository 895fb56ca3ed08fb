"""Waits inside handlers that could never end."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_core import Queue, Tasks, WouldBlock, gather
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.running import OpenWorld, working
from tests.worker.fake import PATIENCE
from tests.worker.local import until


async def limit(backend: Backend, key: str, **changes: Any) -> None:
    """Change the settings of a queue."""
    control = control_of(backend)
    settings = await control.settings(key)
    await control.configure(key, settings.model_copy(update=changes))


async def test_max_inflight_of_its_own_queue(world: OpenWorld) -> None:
    """U7: where handlers that wait have taken all room of a queue, the await of one more of its tasks is refused."""
    tasks = Tasks()
    texts: list[str] = []

    @tasks.task
    async def descend(depth: int) -> int:
        if not depth:
            return 0
        handle = await descend.publish(depth - 1)
        try:
            return await handle.result(PATIENCE) + 1
        except WouldBlock as error:
            texts.append(str(error))
            return -100

    async with world() as (backend, worker):
        await limit(backend, "descend", max_inflight=3)
        async with working(worker(tasks, concurrency=1)):
            handle = await descend.using(on=Queue(backend)).publish(2)
            assert await handle.result(PATIENCE) == 2
            handle = await descend.using(on=Queue(backend)).publish(3)
            assert await handle.result(PATIENCE) == -98
    (text,) = texts
    assert "max_inflight of a queue (of descend: 3)" in text


async def test_waits_over_two_queues() -> None:
    """U7: a circle of waits over two queues is found; a wait for a task that can still end is not refused."""
    tasks = Tasks()
    release = asyncio.Event()
    started: list[str] = []

    @tasks.task
    async def slow() -> str:
        await release.wait()
        return "slow"

    @tasks.task
    async def first(*, circle: bool) -> str:
        handle = await (second.publish() if circle else slow.publish())
        started.append("first")
        return await handle.result(PATIENCE)

    @tasks.task
    async def second() -> str:
        handle = await first.publish(circle=False)
        started.append("second")
        try:
            return await handle.result(PATIENCE)
        except WouldBlock:
            return "refused"

    backend = MemoryBackend()
    queue = Queue(backend)
    await limit(backend, "first", max_inflight=1)
    worker = LocalWorker(tasks, backend=backend, concurrency=2)
    async with working(worker):
        handle = await first.using(on=queue).publish(circle=True)
        assert await handle.result(PATIENCE) == "refused"
        release.set()
        await until(lambda: started.count("first") == 2)
        release.clear()
        # A handler that waits has the only room of the queue, but for a task that runs and will end.
        blocking = await first.using(on=queue).publish(circle=False)
        await until(lambda: started.count("first") == 3)
        waiting = await second.using(on=queue).publish()
        await until(lambda: started.count("second") == 2)
        run = worker._current_run
        assert run is not None
        await until(lambda: run.runner._slots.lent == 2)
        release.set()
        assert await blocking.result(PATIENCE) == "slow"
        assert await waiting.result(PATIENCE) == "slow"


async def test_two_tasks_that_wait_for_each_other() -> None:
    """U7: two running handlers that wait for each other are found, without any limit."""
    tasks = Tasks()
    both = asyncio.Barrier(2)

    @tasks.task
    async def wait(other: str) -> str:
        await both.wait()
        try:
            return await wait.handle(other).result(PATIENCE)
        except WouldBlock as error:
            return str(error)

    backend = MemoryBackend()
    async with (
        tasks.connect(Queue(backend)),
        working(LocalWorker(tasks, backend=backend, concurrency=2)),
    ):
        handles = [await wait.using(id=own).publish(other) for own, other in ("ab", "ba")]
        async with asyncio.timeout(PATIENCE):
            refused, result = await gather(*handles)
    assert refused == result  # the one that waited first got the text of the other one
    assert "the waits are a circle, which no limit changes" in refused
    assert "max_inflight" not in refused
