"""Publishing inside handlers, through the connection of the worker."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core import NotConnected, Queue, TaskQueueError, Tasks
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.running import OpenWorld, working
from tests.worker.fake import PATIENCE

tasks = Tasks()


@tasks.task
async def leaf(number: int) -> int:
    """Double a number."""
    return 2 * number


@tasks.task
async def publisher() -> list[str]:
    """Publish in every way from a coroutine."""
    one = await leaf.publish(1)
    many = await tasks.publish_many([leaf.call(2), leaf.call(3)])
    assert await leaf.handle(one.id).status() is not None
    return [one.id, *(handle.id for handle in many)]


@tasks.task
def blocking() -> list[str]:
    """Publish in every way from a thread."""
    one = leaf.publish_sync(1)
    many = tasks.publish_many_sync([leaf.call(2), leaf.call(3)])
    assert one.status() is not None
    return [one.id, *(handle.id for handle in many)]


async def test_the_connection_of_the_worker(world: OpenWorld) -> None:
    """U9: inside a handler, also in a thread, tasks are published through the worker, with its token."""
    async with world() as (backend, worker):
        queue = Queue(backend)
        handles = [await each.using(on=queue).publish() for each in (publisher, blocking)]
        async with working(worker(tasks)):
            for handle in handles:
                for task_id in await handle.result(PATIENCE):
                    assert await leaf.using(on=queue).handle(task_id).result(PATIENCE) in (2, 4, 6)
        assert (await queue.ledger()).done == 8
    with pytest.raises(NotConnected, match=r"using\(on=queue\).*handler.*tasks\.connect\("):
        await leaf.publish(1)


async def test_the_order_of_connections() -> None:
    """U9: the option ``on`` comes first, then the worker's own connection, then the one that was opened."""
    registry = Tasks()
    given, own, opened = MemoryBackend(), MemoryBackend(), MemoryBackend()

    @registry.task
    async def note(place: str) -> None: ...

    @registry.task
    async def run() -> None:
        await note.using(on=Queue(given)).publish("given")
        await note.publish("own")

        async def elsewhere() -> None:
            await note.publish("opened")

        # The connection of the worker belongs to the worker's event loop.
        await asyncio.to_thread(asyncio.run, elsewhere())

    async with registry.connect(Queue(opened)), working(LocalWorker(registry, backend=own)):
        handle = await run.using(on=Queue(own)).publish()
        await handle.result(PATIENCE)
        await note.publish("opened")
        done = await note.using(on=Queue(own)).publish("own")
        await done.result(PATIENCE)
    counts = [(await Queue(each).ledger("note")).published for each in (given, own, opened)]
    assert counts == [1, 2, 2]


async def test_a_blocking_call_in_the_event_loop() -> None:
    """U9: a blocking publish in a coroutine would wait for itself; it is refused, and the attempt fails."""
    registry = Tasks()
    errors: list[str] = []

    @registry.task
    async def run() -> None:
        try:
            run.publish_sync()
        except TaskQueueError as error:
            errors.append(str(error))

    backend = MemoryBackend()
    async with registry.connect(Queue(backend)), working(LocalWorker(registry, backend=backend)):
        await (await run.publish()).result(PATIENCE)
    (text,) = errors
    assert "would block the event loop" in text
    assert "await" in text


async def test_a_thread_that_outlives_its_worker() -> None:
    """U9: a blocking call of a thread whose worker has ended raises an error, and does not wait for ever."""
    registry = Tasks()
    loop = asyncio.get_running_loop()
    started, released, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    errors: list[BaseException] = []

    @registry.task
    def run() -> None:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result(PATIENCE)
        try:
            run.publish_sync()
        except NotConnected as error:
            errors.append(error)
        loop.call_soon_threadsafe(ended.set)

    backend = MemoryBackend()
    worker = LocalWorker(registry, backend=backend, grace=0)
    async with asyncio.timeout(PATIENCE):
        async with working(worker):
            await run.using(on=Queue(backend)).publish()
            await started.wait()
        released.set()
        await ended.wait()
    assert len(errors) == 1
