"""Waiting for other tasks inside handlers: slots are lent, and waits that could never end are refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from taskqueue_core import (
    Depends,
    Middleware,
    Queue,
    Tasks,
    WouldBlock,
    as_completed,
    gather,
)
from taskqueue_memory import MemoryBackend
from taskqueue_worker import Context, LocalWorker
from tests.application.running import OpenWorld, working
from tests.worker.fake import PATIENCE
from tests.worker.local import until

DEPTH = 20


class Running:
    """The number of handlers that run and do not wait, and the highest such number."""

    def __init__(self) -> None:
        """Nothing runs."""
        self.now = self.most = 0

    def enter(self) -> None:
        """A handler starts, or has waited."""
        self.now += 1
        self.most = max(self.most, self.now)

    def leave(self) -> None:
        """A handler ends, or waits."""
        self.now -= 1


async def test_a_chain_deeper_than_the_worker(world: OpenWorld) -> None:
    """U7: with one slot, a task may await a task that awaits a task, and so on; one handler at a time is active."""
    tasks = Tasks()
    running = Running()

    @tasks.task
    async def descend(depth: int) -> int:
        running.enter()
        try:
            if not depth:
                return 0
            handle = await descend.publish(depth - 1)
            running.leave()
            try:
                below: int = await handle.result(PATIENCE)
            finally:
                running.enter()
            return below + 1
        finally:
            running.leave()

    async with world() as (backend, worker), working(worker(tasks, concurrency=1)):
        handle = await descend.using(on=Queue(backend)).publish(DEPTH)
        assert await handle.result(PATIENCE) == DEPTH
    assert (running.now, running.most) == (0, 1)


async def test_waiting_for_several(world: OpenWorld) -> None:
    """U7: `gather` and `as_completed` lend the slot, and the handler has it between two results."""
    tasks = Tasks()
    running = Running()

    @tasks.task
    async def square(n: int) -> int:
        running.enter()
        await asyncio.sleep(0)
        running.leave()
        return n * n

    @tasks.task
    async def total() -> int:
        handles = await tasks.publish_many(square.call(n) for n in range(5))
        found: int = sum(await gather(*handles))
        running.enter()
        handles = await tasks.publish_many(square.call(n) for n in range(5))
        running.leave()
        async for handle in as_completed(handles):
            running.enter()
            await asyncio.sleep(0.01)
            found += await handle.result()
            running.leave()
        return found

    async with world() as (backend, worker), working(worker(tasks, concurrency=1)):
        handle = await total.using(on=Queue(backend)).publish()
        assert await handle.result(PATIENCE) == 60
    assert (running.now, running.most) == (0, 1)


async def test_the_slots_of_a_batch() -> None:
    """U7: a batch lends the slots of all its tasks, and a batch of the same queue, for which it waits, may start."""
    tasks = Tasks()
    backend = MemoryBackend()
    queue = Queue(backend)

    @tasks.task(batch=4)
    async def halve(numbers: list[int]) -> None:
        below = [n // 2 for n in numbers if n > 1]
        handles = await tasks.publish_many(halve.call([n]) for n in below)
        await gather(*handles)

    async with working(LocalWorker(tasks, backend=backend, concurrency=4)):
        calls = [halve.call([n]) for n in (64, 65, 66, 67)]
        async with tasks.connect(queue):
            await gather(*await tasks.publish_many(calls), timeout=PATIENCE)
    assert (await queue.ledger()).done == 4 * 7


async def test_waiting_in_tasks_of_the_handler() -> None:
    """U7: a handler that awaits results in asyncio tasks of its own lends its slot until the last one ends."""
    tasks = Tasks()

    @tasks.task
    async def leaf(n: int) -> int:
        return n

    @tasks.task
    async def root() -> int:
        handles = await tasks.publish_many(leaf.call(n) for n in (1, 2))
        async with asyncio.TaskGroup() as group:
            found = [group.create_task(handle.result()) for handle in handles]
        blocked = await asyncio.to_thread(lambda: leaf.publish_sync(3).result())
        total: int = sum(each.result() for each in found) + blocked
        return total

    backend = MemoryBackend()
    async with working(LocalWorker(tasks, backend=backend, concurrency=1)):
        handle = await root.using(on=Queue(backend)).publish()
        assert await handle.result(PATIENCE) == 6


async def test_a_result_that_is_there_lends_nothing() -> None:
    """U7: a handler that need not wait keeps its slot, and the worker receives nothing more."""
    tasks = Tasks()
    backend = MemoryBackend()
    queue = Queue(backend)
    lent: list[int] = []

    @tasks.task
    async def leaf() -> int:
        return 1

    @tasks.task
    async def root(task_id: str) -> int:
        return await leaf.handle(task_id).result()

    worker = LocalWorker(tasks, backend=backend, concurrency=1)
    async with working(worker):
        handle = await leaf.using(on=queue).publish()
        assert await handle.result(PATIENCE) == 1
        run = worker._current_run
        assert run is not None
        run.runner._settler.lend = lent.append  # type: ignore[assignment, method-assign]
        other = await root.using(on=queue).publish(handle.id)
        assert await other.result(PATIENCE) == 1
    assert lent == []


async def test_a_timeout_of_a_wait() -> None:
    """U7: a handler whose wait ends with a timeout has its slot again before it goes on."""
    tasks = Tasks()
    running = Running()
    release = asyncio.Event()

    @tasks.task
    async def other() -> None:
        running.enter()
        await release.wait()
        running.leave()

    @tasks.task
    async def root(*, own: bool) -> str:
        handle = await other.publish()
        try:
            if own:
                async with asyncio.timeout(0.01):
                    await handle.result()
            else:
                await handle.result(0.01)
        except TimeoutError:
            running.enter()
            running.leave()
            return "timeout"
        return "never"

    backend = MemoryBackend()
    queue = Queue(backend)
    for own in (True, False):
        release.clear()
        async with working(LocalWorker(tasks, backend=backend, concurrency=1)):
            handle = await root.using(on=queue).publish(own=own)
            await until(lambda: running.now == 1)
            await asyncio.sleep(0.02)  # the timeout passes while the other task has the slot
            release.set()
            assert await handle.result(PATIENCE) == "timeout"
    assert running.most == 1


async def test_a_worker_that_stops_while_handlers_wait() -> None:
    """U7: handlers that wait are released after the grace period, with those that have borrowed their slots."""
    tasks = Tasks()
    started: list[str] = []

    @tasks.task
    async def forever() -> None:
        started.append("forever")
        await asyncio.sleep(3600)

    @tasks.task
    async def root() -> None:
        handle = await forever.publish()
        started.append("root")
        await handle.result()

    backend = MemoryBackend()
    queue = Queue(backend)
    async with working(LocalWorker(tasks, backend=backend, concurrency=1, grace=0)):
        await root.using(on=queue).publish()
        await until(lambda: len(started) == 2)
    assert (await queue.ledger()).waiting == 2


async def test_a_thread_must_not_wait(world: OpenWorld) -> None:
    """U7: a synchronous handler that would block on a result gets `WouldBlock`, and a result that is there."""
    tasks = Tasks()
    texts: list[str] = []

    @tasks.task
    async def leaf() -> int:
        return 1

    @tasks.task
    def root(task_id: str) -> int:
        handle = leaf.using(id=task_id).publish_sync()
        try:
            return handle.result()
        except WouldBlock as error:
            texts.append(str(error))
        try:
            asyncio.run(elsewhere())
        except WouldBlock as error:
            texts.append(str(error))
        return 0

    async def elsewhere() -> None:
        handle = await leaf.using(on=Queue(MemoryBackend())).publish()
        await handle.result()

    async with world() as (backend, worker), working(worker(tasks, concurrency=1)):
        queue = Queue(backend)
        handle = await root.using(on=queue).publish("a")
        assert await handle.result(PATIENCE) == 0
        assert await leaf.using(on=queue).handle("a").result(PATIENCE) == 1
        handle = await root.using(on=queue).publish("a")
        assert await handle.result(PATIENCE) == 1
    assert len(texts) == 2
    assert all("await the result in an async handler" in text for text in texts)


async def test_async_parts_of_a_synchronous_handler() -> None:
    """U7: a dependency or middleware of a synchronous handler may wait, and lends its slot."""
    results: list[int] = []

    class Waiting(Middleware):
        async def run(self, context: Context, handle: Callable[[], Awaitable[Any]]) -> Any:
            if context.key == "root":
                results.append(await (await leaf.publish(1)).result())
            return await handle()

    tasks = Tasks(middleware=[Waiting()])

    @tasks.task
    async def leaf(n: int) -> int:
        return n

    async def number() -> int:
        return await (await leaf.publish(2)).result()

    @tasks.task
    def root(n: int = Depends(number)) -> int:
        return n

    backend = MemoryBackend()
    async with working(LocalWorker(tasks, backend=backend, concurrency=1)):
        handle = await root.using(on=Queue(backend)).publish()
        assert await handle.result(PATIENCE) == 2
    assert results == [1]


async def test_waiting_inside_as_completed() -> None:
    """U7: the body of ``as_completed`` may publish and await other tasks, with one slot and nested, too."""
    tasks = Tasks()

    @tasks.task
    async def leaf(number: int) -> int:
        return number

    @tasks.task
    async def parent(number: int) -> int:
        total = 0
        async for handle in as_completed([await leaf.publish(number), await leaf.publish(0)]):
            total += await handle.result()
            total += sum(await gather(await leaf.publish(1), await leaf.publish(1)))
            async for inner in as_completed([await leaf.publish(10), await leaf.publish(10)]):
                total += await inner.result() + await (await leaf.publish(100)).result()
        return total

    backend = MemoryBackend()
    async with (
        tasks.connect(Queue(backend)),
        working(LocalWorker(tasks, backend=backend, concurrency=1)),
    ):
        handles = [await parent.publish(5), await parent.publish(5)]
        assert await gather(*handles, timeout=PATIENCE) == [5 + 2 * (2 + 2 * 110)] * 2
