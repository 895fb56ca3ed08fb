"""Graceful shutdown of the server, in this process and in a separate process that receives signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from websockets.exceptions import InvalidStatus

from taskqueue_core.config import Settings
from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from tests.server.support import Worker, eventually, http, receipts, running

PROGRAM = """
from taskqueue_core.config import Settings
from taskqueue_server import serve
settings = Settings(port=0, drain={drain}, grace=0.2, lease=120)
serve(settings, "taskqueue_memory", on_ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""
WORKER = """
import asyncio, sys
from websockets.asyncio.client import connect
async def main():
    async with connect(sys.argv[1], subprotocols=["taskqueue.v1"], proxy=None) as socket:
        await socket.send('{"type":"hello","worker_id":"victim","keys":["k"],"credit":9}')
        async for text in socket:
            print(text, flush=True)
asyncio.run(main())
"""


class Child:
    """A server that runs in a child process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    def worker(self, worker_id: str = "w", **hello: object) -> Worker:
        """Return a worker that connects to this server."""
        url = self.url.replace("http", "ws") + "/v1/socket"
        return Worker(url, {"worker_id": worker_id, "keys": ["k"], **hello})

    async def publish(self, *ids: str) -> None:
        """Publish tasks over HTTP."""
        async with httpx2.AsyncClient(base_url=self.url, trust_env=False, verify=False) as client:
            for task_id in ids:
                answer = await client.post("/v1/tasks", json={"key": "k", "id": task_id})
                assert answer.status_code == 201

    async def ended(self, seconds: float) -> int:
        """Return the exit code of the process, which must exit within this many seconds."""
        return await asyncio.wait_for(self.process.wait(), seconds)


def environment() -> dict[str, str]:
    """Return environment variables with which a child process imports this source tree."""
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1"}


@asynccontextmanager
async def child(drain: float = 2.0) -> AsyncIterator[Child]:
    """Start a server process, and kill it at the end of the block if it is still running."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM.format(drain=drain),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield Child(process, line.decode().strip())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.fast_clock
class TestDraining:
    """Fault A7: a server that is asked to stop."""

    async def test_workers_may_settle_what_they_run(self) -> None:
        """Fault A7: a draining server delivers no tasks, but accepts outcomes of running ones.

        It closes a socket once everything is settled.
        """
        async with running(drain=5) as it:
            await it.publish(*(f"t{i}" for i in range(4)))
            async with it.worker(credit=5) as worker:
                got = receipts(await worker.deliveries(4))
                it.server.stop()
                assert 0 < (await worker.frame("drain"))["seconds"] <= 5
                await it.publish("late")
                await worker.send("credit", n=4)
                await worker.send("ack", receipts=got)
                assert sorted((await worker.settled(4))[0]) == sorted(got)
                assert await worker.closed() == 1012
                assert not any(f["type"] == "deliver" for f in worker.passed_over)
            assert it.ended
            await it.ended
            assert (await it.ledger()).done == 4
            assert (await it.ledger()).waiting == 1
            stats = await it.backend.control.stats("k")  # type: ignore[attr-defined]
            assert (stats.delivered, stats.redelivered) == (4, 0)

    async def test_what_is_not_settled_in_time_goes_back(self) -> None:
        """Fault A7: tasks that are not settled within the drain time return to the queue.

        Their attempts and losses do not change.
        """
        loop = asyncio.get_running_loop()
        async with running(drain=30, lease=60) as it:
            await it.publish("a", "b")
            async with it.worker(credit=2) as worker:
                got = await worker.deliveries(2)
                began = loop.time()
                it.server.stop()
                await worker.send("ack", receipts=receipts(got[:1]))
                assert await worker.closed(60) == 1012
                assert it.ended
                await it.ended
                assert 30 <= loop.time() - began < 31
            ledger = await it.ledger()
            assert (ledger.done, ledger.waiting, ledger.in_flight) == (1, 1, 0)
            (status,) = await it.backend.control.statuses("k", "b")  # type: ignore[attr-defined]
            assert (status.attempt, status.losses, status.state) == (1, 0, State.WAITING)

    async def test_idle_workers_and_strangers_are_sent_away_at_once(self) -> None:
        """Fault A7: connections without deliveries are closed at once."""
        async with running(drain=30) as it, it.worker(credit=5) as idle, it.socket() as stranger:
            it.server.stop()
            assert await idle.closed(2) == 1012
            await asyncio.wait_for(stranger.wait_closed(), 2)
            assert stranger.close_code == 1012

    async def test_no_new_connection_is_accepted(self) -> None:
        """As soon as the drain starts, ``/ready`` returns 503 and new sockets are refused."""
        async with running(drain=3) as it:
            await it.publish("a")
            async with http(it) as client, it.worker(credit=1) as worker:
                await client.get("/ready")
                got = receipts(await worker.deliveries(1))
                draining = asyncio.create_task(it.context.drain())
                await worker.frame("drain")
                ready = await client.get("/ready")
                assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
                with pytest.raises(InvalidStatus) as caught:
                    async with it.socket():
                        pass
                assert caught.value.response.status_code == 503
                await worker.send("ack", receipts=got)
                assert await worker.settled(1) == (got, [])
                await draining

    async def test_a_worker_that_does_not_read_does_not_delay_the_drain(self) -> None:
        """Fault A7: a worker that does not read its frames is disconnected when the drain time is over."""
        loop = asyncio.get_running_loop()
        async with running(drain=30, lease=60) as it:
            await it.publish(*(f"t{i}" for i in range(50)), payload=b'"' + b"x" * 200_000 + b'"')
            async with it.worker(credit=50) as worker:
                worker.socket.transport.pause_reading()
                await it.reaches(in_flight=50)
                began = loop.time()
                it.server.stop()
                assert it.ended
                await it.ended
                closing = 1.0  # the server waits that long for the answer to its close frame
                assert 30 <= loop.time() - began < 30 + closing + 1
                worker.break_off()
            assert (await it.ledger()).waiting == 50

    async def test_a_broken_socket_in_its_grace_does_not_delay_the_drain(self) -> None:
        """Fault A7: the drain ends the grace of a broken connection, and its task returns to the queue."""
        loop = asyncio.get_running_loop()
        async with running(drain=5, grace=30) as it:
            await it.publish("a")
            async with it.worker(credit=1) as worker:
                await worker.deliveries(1)
                worker.break_off()
            began = loop.time()
            it.server.stop()
            assert it.ended
            await it.ended
            assert loop.time() - began < 1
            assert (await it.ledger()).waiting == 1

    async def test_an_immediate_end_is_no_fault_of_the_workers(self) -> None:
        """Law 3: if the server stops immediately, running tasks return to the queue and do not count as lost."""
        backend = MemoryBackend()
        async with running(backend, drain=60) as it:
            await it.publish("a")
            async with it.worker(credit=1) as worker:
                await worker.deliveries(1)
                it.server.stop()
                await worker.frame("drain")
                it.server.stop()
                assert it.ended
                await asyncio.wait_for(it.ended, 2)
                worker.break_off()
        (status,) = await backend.control.statuses("k", "a")
        assert status is not None
        assert (status.state, status.losses) == (State.WAITING, 0)


class TestSignals:
    """Faults A1 and A7: signals to real processes."""

    async def test_sigterm_drains(self) -> None:
        """Fault A7: after SIGTERM the worker settles its running task, and the server then exits with code 0."""
        async with child() as it:
            await it.publish("a")
            async with it.worker(credit=2) as worker:
                got = receipts(await worker.deliveries(1))
                it.process.send_signal(signal.SIGTERM)
                await worker.frame("drain")
                await worker.send("ack", receipts=got)
                assert await worker.settled(1) == (got, [])
                assert await worker.closed() == 1012
            assert await it.ended(30) == 0
            assert it.process.stdout
            assert (await it.process.stdout.read()).strip() == b"ended"

    async def test_it_ends_in_time_though_a_worker_does_not(self) -> None:
        """Fault A7: the process exits after the drain time, even if a worker settles nothing.

        The drain time is far shorter than the lease.
        """
        async with child(drain=0.5) as it:
            await it.publish("a")
            async with it.worker(credit=1) as worker:
                await worker.deliveries(1)
                it.process.send_signal(signal.SIGINT)
                assert await worker.closed() == 1012
                assert await it.ended(30) == 0

    async def test_a_second_signal_ends_it_at_once(self) -> None:
        """A second SIGTERM ends the drain at once, without a traceback in the log."""
        async with child(drain=60) as it:
            await it.publish("a")
            async with it.worker(credit=1) as worker:
                await worker.deliveries(1)
                it.process.send_signal(signal.SIGTERM)
                await worker.frame("drain")
                it.process.send_signal(signal.SIGTERM)
                await it.ended(30)
                assert it.process.stderr
                assert b"Traceback" not in await it.process.stderr.read()

    async def test_a_killed_workers_tasks_are_back_within_a_second(self) -> None:
        """D4, REV-E3 and fault A1: after kill -9 of a worker, another worker gets its tasks once the grace is over.

        Each task counts as lost once.
        """
        assert Settings.model_fields["grace"].default <= 0.5
        async with running(grace=0.1, lease=60) as it:
            await it.publish("a", "b")
            victim = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WORKER, it.ws, stdout=asyncio.subprocess.PIPE
            )
            await it.reaches(in_flight=2, seconds=60)
            async with it.worker("heir", credit=2) as heir:
                victim.kill()
                again = await heir.deliveries(2)
                assert [(d["attempt"], d["losses"]) for d in again] == [(1, 1), (1, 1)]
            await victim.communicate()
            await eventually(lambda: len(it.context.registry) == 0)
