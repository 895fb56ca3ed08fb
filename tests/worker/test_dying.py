"""Worker processes that crash, exit or are stopped, and what the server receives from them."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from taskqueue_core.protocol.frames import AckFrame, Bye, Progress, RedeliverFrame
from tests.worker.fake import PATIENCE, FakeServer, Peer, work
from tests.worker.processes import program


@asynccontextmanager
async def process(server: FakeServer) -> AsyncIterator[tuple[Process, Peer]]:
    """Start a worker process; yield it with its connection to the server."""
    async with program(server.url, "60") as child:
        yield child, await server.welcomed()


async def ended(child: Process) -> int:
    """Return the exit code of a process."""
    async with asyncio.timeout(PATIENCE):
        return await child.wait()


@pytest.mark.parametrize(("key", "code"), [("exit", 9), ("kill", -signal.SIGKILL)])
async def test_a_crash_settles_nothing(server: FakeServer, key: str, code: int) -> None:
    """Faults A1, A2, A11, OPEN-A5: a crashing worker sends no outcome and no bye.

    The server therefore counts a loss and delivers the tasks again.
    """
    async with process(server) as (child, peer):
        await peer.deliver(work(key=key), work(60, key="sleep"))
        assert await ended(child) == code
        await peer.end()
        assert peer.settled() == []
        assert peer.count(Bye) == 0


@pytest.mark.parametrize("key", ["sys.exit", "sys.exit.thread"])
async def test_exiting_is_no_outcome(server: FakeServer, key: str) -> None:
    """Fault A11: a handler that calls ``sys.exit`` ends the process with its exit code, and its task counts as lost.

    Other running tasks are finished first.
    """
    async with process(server) as (child, peer):
        other = work(0.2, key="sleep")
        await peer.deliver(other, work(key=key))
        assert await ended(child) == 7
        await peer.end()
        assert peer.settled() == [other.receipt]
        assert peer.count(AckFrame) == 1
        assert peer.count(Bye) == 0


async def test_an_interrupt_releases_the_task(server: FakeServer) -> None:
    """A task whose handler is interrupted by Ctrl-C is released and does not count as failed."""
    async with process(server) as (child, peer):
        await peer.deliver(task := work(key="interrupt"))
        assert (await peer.next(RedeliverFrame)).receipts == [task.receipt]
        await peer.next(Bye)
        assert await ended(child) != 0


async def test_the_first_signal_lets_tasks_finish(server: FakeServer) -> None:
    """After SIGTERM, running tasks are finished and the process exits with 0."""
    async with process(server) as (child, peer):
        await peer.deliver(task := work(0.3, key="sleep"))
        await peer.next(Progress)
        child.send_signal(signal.SIGTERM)
        assert (await peer.next(AckFrame)).receipts == [task.receipt]
        await peer.next(Bye)
        assert await ended(child) == 0


async def test_the_second_signal_hands_everything_back(server: FakeServer) -> None:
    """A second SIGINT releases all running tasks, and a blocked thread does not keep the process alive."""
    async with process(server) as (child, peer):
        tasks = [work(60, key="sleep"), work(key="hang")]
        await peer.deliver(*tasks)
        for _ in tasks:
            await peer.next(Progress)
        child.send_signal(signal.SIGINT)
        assert child.stderr
        async with asyncio.timeout(PATIENCE):
            while b"stopping; a second signal" not in await child.stderr.readline():
                pass
        assert peer.settled() == []
        child.send_signal(signal.SIGINT)
        await peer.next(Bye)
        assert await ended(child) == 0
        assert sorted(peer.settled()) == sorted(task.receipt for task in tasks)


async def test_a_frozen_worker_learns_that_it_lost_its_tasks(server: FakeServer) -> None:
    """Fault A4: a worker that was frozen reconnects and learns that it has lost its task, which it does not ack."""
    async with process(server) as (child, before):
        await before.deliver(task := work(60, key="sleep"))
        await before.next(Progress)
        child.send_signal(signal.SIGSTOP)
        before.cut()
        child.send_signal(signal.SIGCONT)
        after = await server.accept()
        assert after.hello.holding == [task.receipt]
        await after.welcome(adopted=[])
        await after.deliver(other := work(0.0, key="sleep"))
        assert (await after.next(AckFrame)).receipts == [other.receipt]
        child.send_signal(signal.SIGTERM)
        await after.next(Bye)
        assert after.settled() == [other.receipt]
