"""Stopping a worker: no new tasks, time for running ones, release of the rest, and confirmation of all outcomes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.protocol.frames import AckFrame, Bye, Credit, RedeliverFrame, RetryFrame
from taskqueue_worker import Worker
from tests.worker.fake import PATIENCE, FakeServer, outcome, running, work
from tests.worker.local import until


class Handlers:
    """A synchronous and an asynchronous handler, which wait until the test opens their gate."""

    def __init__(self, worker: Worker) -> None:
        """The handlers are registered for the keys ``sync`` and ``async``."""
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.cancelled = 0
        worker.task("sync")(self.block)
        worker.task("async")(self.wait)

    def block(self) -> str:
        """Block the thread until the gate opens."""
        self.entered.release()
        assert self.gate.wait(30)
        return "sync"

    async def wait(self) -> str:
        """Wait until the gate opens; clean up if cancelled."""
        self.entered.release()
        try:
            await until(self.gate.is_set)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.cancelled += 1
            raise
        return "async"

    async def both_entered(self) -> None:
        """Wait until both handlers have been called."""
        for _ in range(2):
            assert await asyncio.to_thread(self.entered.acquire, timeout=30)


async def test_running_tasks_are_given_time(server: FakeServer) -> None:
    """A stopping worker grants no credit, releases new deliveries, and finishes its running tasks.

    It says bye only after all outcomes are confirmed.
    """
    worker = Worker(url=server.url, prefetch=1, concurrency=2)
    handlers = Handlers(worker)
    async with running(worker) as ended:
        peer = await server.welcomed()
        tasks = [work(key="sync"), work(key="async"), work(key="sync")]
        await peer.deliver(*tasks)
        await handlers.both_entered()
        worker.stop()
        assert (await peer.next(RedeliverFrame)).receipts == [tasks[2].receipt]
        await peer.deliver(late := work(key="sync"))
        assert (await peer.next(RedeliverFrame)).receipts == [late.receipt]
        peer.confirms = False
        handlers.gate.set()
        acked: list[str] = []
        while len(acked) < 2:
            acked += (await peer.next(AckFrame)).receipts
        assert sorted(acked) == sorted(task.receipt for task in tasks[:2])
        assert peer.count(Bye) == 0
        peer.cut()
        peer = await server.accept()
        assert peer.hello.credit == 0
        assert sorted(peer.hello.holding) == sorted(acked)
        await peer.welcome()
        await peer.next(Bye)
        assert await outcome(ended) is None
        assert sorted(peer.settled()) == sorted(acked)
        assert handlers.cancelled == 0
        assert peer.count(Credit) == 0


@pytest.mark.parametrize("way", ["after the grace", "at a second stop", "when cancelled"])
async def test_the_rest_is_released(server: FakeServer, way: str) -> None:
    """After the grace, a coroutine is cancelled and a blocked thread is abandoned; their tasks are released.

    A second stop, or a cancellation of the worker, ends the grace at once.
    """
    worker = Worker(url=server.url, grace=0.05 if way == "after the grace" else 3600)
    handlers = Handlers(worker)
    serving = asyncio.create_task(worker.serve())
    peer = await server.welcomed()
    tasks = [work(key="sync"), work(key="async")]
    await peer.deliver(*tasks)
    await handlers.both_entered()
    if way == "when cancelled":
        serving.cancel()
    else:
        worker.stop()
    if way == "at a second stop":
        worker.stop(now=True)
    await peer.next(Bye)
    assert sorted(peer.settled()) == sorted(task.receipt for task in tasks)
    assert peer.count(RedeliverFrame) == len(peer.log) - peer.count(Bye) - peer.count(Credit)
    await asyncio.wait([serving], timeout=PATIENCE)
    assert serving.cancelled() == (way == "when cancelled")
    assert serving.done()
    assert handlers.cancelled == 1
    handlers.gate.set()


async def test_a_worker_can_serve_again(server: FakeServer) -> None:
    """A worker can serve again after a stop, but not twice at the same time."""
    worker = Worker(url=server.url)
    worker.stop()  # the worker is not serving, so this does nothing
    Handlers(worker).gate.set()
    identities = set()
    for _ in range(2):
        serving = asyncio.create_task(worker.serve())
        peer = await server.welcomed()
        identities.add(peer.hello.worker_id)
        with pytest.raises(ConfigurationError, match="already"):
            await worker.serve()
        await peer.deliver(work(key="async"))
        await peer.next(AckFrame)
        worker.stop()
        await serving
    assert len(identities) == 2  # the id is new for each start


async def test_stopping_without_a_server_ends(server: FakeServer) -> None:
    """A worker without a connection stops at once, because it has nothing to report."""
    worker = Worker(url=server.url)
    Handlers(worker)
    await server.close()
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0.05)
    worker.stop()
    async with asyncio.timeout(30):
        await serving


async def test_a_handler_that_fails_while_stopping_is_retried(server: FakeServer) -> None:
    """If a handler fails while the worker is stopping, its task is retried as usual."""
    worker = Worker(url=server.url)
    gate = threading.Event()
    entered = threading.Event()

    @worker.task("work")
    def fail() -> None:
        entered.set()
        gate.wait(30)
        raise ValueError("x")

    async with running(worker) as ended:
        peer = await server.welcomed()
        await peer.deliver(work())
        assert await asyncio.to_thread(entered.wait, 30)
        worker.stop()
        gate.set()
        assert (await peer.next(RetryFrame)).error == "ValueError: x"
        await peer.next(Bye)
        assert await outcome(ended) is None
