"""Liveness: a busy worker is alive, a silent server is not."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from taskqueue_core.protocol.frames import Ack, Ping, Pong
from taskqueue_core.worker import Worker
from tests.worker.fake import FakeServer, running, work


@pytest.mark.parametrize("sync", [False, True])
async def test_a_handler_that_blocks_its_loop_keeps_the_connection(
    server: FakeServer, *, sync: bool
) -> None:
    """Fault A5: for more than two leases of pure computing, every ping goes out in time and every ping is answered."""
    lease = 0.45
    worker = Worker(server.url)
    times: list[float] = []

    def compute() -> str:
        end = time.perf_counter() + 2.5 * lease
        while time.perf_counter() < end:
            sum(range(1000))
        return "done"

    if sync:
        worker.task("work")(compute)
    else:

        @worker.task("work")
        async def block() -> str:
            return compute()

    async with running(worker):
        peer = await server.welcomed(lease=lease)
        await peer.deliver(task := work())
        while not peer.count(Ack):
            await peer.send(Ping(n=1))
            await peer.next(Pong)
            await peer.next(Ping)
            times.append(time.perf_counter())
        assert (await peer.next(Ack)).receipts == [task.receipt]
        assert not peer.ended.is_set()
        assert len(times) >= 5
        assert max(b - a for a, b in pairwise(times)) < lease


async def test_a_silent_server_is_given_up(server: FakeServer) -> None:
    """Fault G3: nothing for a lease, and the worker connects anew with what it runs."""
    worker = Worker(server.url)
    cancelled = threading.Event()

    @worker.task("work")
    async def sleep() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async with running(worker):
        peer = await server.welcomed(lease=0.3)
        await peer.deliver(task := work())
        await peer.next(Ping)
        peer.pongs = False
        began = time.perf_counter()
        peer = await server.welcomed()
        assert 0.15 < time.perf_counter() - began < 1.0
        assert peer.hello.holding == [task.receipt]
        assert not cancelled.is_set()


async def test_a_server_that_talks_is_not_silent(server: FakeServer) -> None:
    """Any frame counts as a sign of life."""
    worker = Worker(server.url)
    worker.task("work")(lambda: None)
    async with running(worker):
        peer = await server.welcomed(lease=0.3)
        peer.pongs = False
        for _ in range(12):
            await peer.send(Pong(n=0))
            await asyncio.sleep(0.05)
        assert not peer.ended.is_set()
