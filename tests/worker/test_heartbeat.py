"""Pings: a busy worker counts as alive, and a silent server as lost."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from taskqueue_core.protocol.frames import AckFrame, Degraded, Ping, Pong
from taskqueue_worker import Worker
from tests.worker.fake import PATIENCE, FakeServer, running, work

LEASE = 0.3


@pytest.mark.parametrize("sync", [False, True])
async def test_a_handler_that_blocks_its_loop_keeps_the_connection(
    server: FakeServer, *, sync: bool
) -> None:
    """Fault A5: while a handler blocks its event loop for more than two leases, pings are sent and answered in time."""
    worker = Worker(url=server.url)
    enough = threading.Event()
    in_time = 0

    def compute() -> str:
        while not enough.is_set():
            sum(range(1000))
        return "done"

    if sync:
        worker.task("work")(compute)
    else:

        @worker.task("work")
        async def block() -> str:
            return compute()

    async with running(worker):
        peer = await server.welcomed(lease=LEASE)
        await peer.deliver(task := work())
        try:
            async with asyncio.timeout(PATIENCE):
                while in_time < 7:  # one ping in each third of a lease
                    before = time.perf_counter()
                    await peer.send(Ping(n=1))
                    await peer.next(Pong)
                    await peer.next(Ping)
                    in_time += time.perf_counter() - before < LEASE * 2 / 3
        finally:
            enough.set()
        assert (await peer.next(AckFrame)).receipts == [task.receipt]
        assert not peer.ended.is_set()


async def test_a_silent_server_is_given_up(server: FakeServer) -> None:
    """Fault G3: if the server sends nothing for a lease, the worker reconnects and keeps its running tasks."""
    worker = Worker(url=server.url)
    cancelled = threading.Event()

    @worker.task("work")
    async def sleep() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async with running(worker):
        silent = await server.welcomed(lease=LEASE)
        await silent.deliver(task := work())
        await silent.next(Ping)
        silent.pongs = False
        before, pings = time.perf_counter(), silent.count(Ping)
        await silent.heard()
        peer = await server.welcomed()
        assert time.perf_counter() - before >= LEASE
        # three per lease, and one more if this machine was suspended
        assert silent.count(Ping) - pings <= 5
        assert peer.hello.holding == [task.receipt]
        assert not cancelled.is_set()


async def test_a_server_that_talks_is_not_silent(server: FakeServer) -> None:
    """Any frame of the server shows that it is alive, not only a pong."""
    worker = Worker(url=server.url)
    worker.task("work")(lambda: None)
    async with running(worker):
        peer = await server.welcomed(lease=LEASE)
        peer.pongs = False
        for _ in range(6):
            await peer.send(Degraded(ok=True))
            await peer.next(Ping)
        assert not peer.ended.is_set()
