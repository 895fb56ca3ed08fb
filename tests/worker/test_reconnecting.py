"""Losing the server: nothing is repeated, nothing is lost, nobody is called twice."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from http import HTTPStatus

import pytest

from taskqueue_core.protocol.frames import (
    CLOSE_PROTOCOL,
    CLOSE_RESTART,
    CLOSE_UNAUTHENTICATED,
    AckFrame,
    Credit,
    Degraded,
    Drain,
    RedeliverFrame,
)
from taskqueue_worker import Worker, WorkerRefused
from tests.worker.fake import FakeServer, outcome, running, work
from tests.worker.local import until

LOGGER = "taskqueue.worker"


class Gate:
    """A handler that waits until it is let go."""

    def __init__(self, worker: Worker) -> None:
        """Register for the key ``work``."""
        self.calls: list[int] = []
        self.cancelled = 0
        self._open = threading.Event()
        worker.task("work")(self.wait)

    async def wait(self, n: int) -> int:
        """Wait."""
        self.calls.append(n)
        try:
            await until(self._open.is_set)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return n

    def open(self) -> None:
        """Let all go."""
        self._open.set()

    async def entered(self, count: int) -> None:
        """Wait until it was called ``count`` times."""
        await until(lambda: len(self.calls) >= count)


async def test_a_running_task_survives_the_loss_of_its_connection(server: FakeServer) -> None:
    """REV-E3, fault E5: the worker is back at once, keeps what it runs, and acks it there."""
    pauses = itertools.count()
    worker = Worker(server.url, concurrency=3, uniform=lambda: float(next(pauses)))
    gate = Gate(worker)
    async with running(worker):
        peer = await server.welcomed()
        tasks = [work(n) for n in range(2)]
        await peer.deliver(*tasks)
        await gate.entered(2)
        peer.cut()
        peer = await server.accept()
        assert next(pauses) <= 1  # a tenth of a second at most: a server waits for half of one
        assert sorted(peer.hello.holding) == sorted(task.receipt for task in tasks)
        assert peer.hello.credit == 1
        await peer.welcome(adopted=[tasks[0].receipt])
        await until(lambda: gate.cancelled)
        gate.open()
        assert (await peer.next(AckFrame)).receipts == [tasks[0].receipt]
        assert gate.calls == [0, 1]
        assert gate.cancelled == 1
        assert peer.settled() == [tasks[0].receipt]


async def test_an_unconfirmed_outcome_is_sent_again(server: FakeServer) -> None:
    """Fault A2, fault E2: with its confirmation lost, an ack is repeated and the handler is not."""
    worker = Worker(server.url)
    gate = Gate(worker)
    gate.open()
    async with running(worker):
        peer = await server.welcomed()
        peer.confirms = False
        task = work(1)
        await peer.deliver(task)
        await peer.next(AckFrame)
        peer.cut()
        peer = await server.accept()
        assert peer.hello.holding == [task.receipt]
        assert peer.hello.credit == 10
        await peer.welcome()
        assert (await peer.next(AckFrame)).receipts == [task.receipt]
        assert gate.calls == [1]
        peer.cut()
        assert (await server.welcomed()).hello.holding == []


async def test_an_outcome_of_a_lost_receipt_is_dropped(server: FakeServer) -> None:
    """Fault G5: what the server does not adopt is somebody else's now."""
    worker = Worker(server.url)
    gate = Gate(worker)
    gate.open()
    async with running(worker):
        peer = await server.welcomed()
        peer.confirms = False
        await peer.deliver(work(1))
        await peer.next(AckFrame)
        peer.cut()
        peer = await server.accept()
        await peer.welcome(adopted=[])
        await peer.deliver(task := work(2))
        assert (await peer.next(AckFrame)).receipts == [task.receipt]
        assert peer.settled() == [task.receipt]


async def test_tasks_finish_while_the_server_is_away(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault A6: the worker tries on quietly and reports everything when the server is back."""
    caplog.set_level(logging.INFO, LOGGER)
    worker = Worker(server.url, uniform=lambda: 0.0)
    gate = Gate(worker)
    async with running(worker):
        peer = await server.welcomed()
        tasks = [work(n) for n in range(5)]
        await peer.deliver(*tasks)
        await gate.entered(5)
        server.refuse = HTTPStatus.SERVICE_UNAVAILABLE
        tried = server.handshakes
        peer.cut()
        gate.open()
        await until(lambda: server.handshakes >= tried + 2)
        server.refuse = None
        peer = await server.welcomed()
        assert sorted(peer.hello.holding) == sorted(task.receipt for task in tasks)
        done: list[str] = []
        while len(done) < 5:
            done += (await peer.next(AckFrame)).receipts
        assert sorted(done) == sorted(task.receipt for task in tasks)
    states = [r.getMessage() for r in caplog.records if "server" in r.getMessage()]
    assert len(states) == 1, states
    assert states[0].startswith("lost the connection to the server")


async def test_a_worker_may_start_before_its_server(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits, saying so once."""
    await server.close()
    worker = Worker(server.url)
    gate = Gate(worker)
    gate.open()
    async with running(worker):
        await until(lambda: caplog.records)
        await asyncio.sleep(0.1)
        assert [r.getMessage().split(":")[0] for r in caplog.records] == [
            "cannot reach the server http"
        ]
        await server.start()
        await server.welcomed()


async def test_a_draining_server_is_left_when_all_is_settled(server: FakeServer) -> None:
    """Fault A7: no more credit is given to it; the outcome still goes there; then the worker connects anew."""
    worker = Worker(server.url)
    gate = Gate(worker)
    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(task := work(1))
        await gate.entered(1)
        await peer.send(Drain(seconds=5))
        await peer.heard()
        gate.open()
        assert (await peer.next(AckFrame)).receipts == [task.receipt]
        await peer.end()
        assert peer.count(Credit) == 0
        assert (await server.welcomed()).hello.holding == []


async def test_a_long_task_moves_from_a_draining_server_to_the_next(server: FakeServer) -> None:
    """Fault A7, G13: what is still running when the server goes is offered to the next one."""
    worker = Worker(server.url)
    gate = Gate(worker)
    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(task := work(1))
        await gate.entered(1)
        await peer.send(Drain(seconds=0.0))
        await peer.socket.close(CLOSE_RESTART)
        peer = await server.welcomed()
        assert peer.hello.holding == [task.receipt]
        gate.open()
        assert (await peer.next(AckFrame)).receipts == [task.receipt]
        assert gate.calls == [1]


@pytest.mark.parametrize("status", [401, 403, 421, 426])
async def test_a_refusal_ends_the_worker(server: FakeServer, status: int) -> None:
    """Fault K1: trying again does not help against a wrong token, a missing right or another protocol."""
    server.refuse = HTTPStatus(status)
    worker = Worker(server.url, token="secret")
    Gate(worker)
    async with running(worker) as ended:
        error = await outcome(ended)
        assert isinstance(error, WorkerRefused)
        assert f"HTTP {status}" in str(error)
        assert "secret" not in str(error)
        assert server.handshakes == 1


async def test_a_token_that_is_refused_later_ends_the_worker(server: FakeServer) -> None:
    """Fault K1: close code 4401. The running handler is cancelled: its outcome cannot be told to anybody."""
    worker = Worker(server.url, token="secret")
    gate = Gate(worker)
    async with running(worker) as ended:
        peer = await server.welcomed()
        assert peer.socket.request is not None
        assert peer.socket.request.headers["Authorization"] == "Bearer secret"
        assert peer.hello.token is None
        await peer.deliver(work(1))
        await gate.entered(1)
        await peer.socket.close(CLOSE_UNAUTHENTICATED, "token expired")
        error = await outcome(ended)
        assert isinstance(error, WorkerRefused)
        assert "token expired" in str(error)
        assert gate.cancelled == 1


async def test_a_protocol_error_is_not_hammered(server: FakeServer) -> None:
    """Close code 4400: the worker comes back, but never at once, and ever later."""
    worker = Worker(server.url, uniform=lambda: 1.0)
    Gate(worker)
    async with running(worker):
        began = time.perf_counter()
        for _ in range(2):
            peer = await server.welcomed()
            await peer.socket.close(CLOSE_PROTOCOL, "no")
        await server.welcomed()
        assert time.perf_counter() - began >= 0.1 + 0.2


async def test_a_server_that_breaks_the_protocol_is_left(server: FakeServer) -> None:
    """Fault G9: the close tells the code of a protocol error; the worker lives on."""
    worker = Worker(server.url)
    gate = Gate(worker)
    gate.open()
    async with running(worker):
        peer = await server.welcomed()
        await peer.socket.send("[]")
        await peer.end()
        assert peer.socket.close_code == CLOSE_PROTOCOL
        peer = await server.welcomed()
        await peer.socket.send('{"type":"from_the_future"}')
        await peer.deliver(work(1))
        await peer.next(AckFrame)


async def test_a_store_out_of_reach_is_no_reason_to_leave(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault G14: running tasks go on, the connection stays, the change is logged once each way."""
    caplog.set_level(logging.INFO, LOGGER)
    worker = Worker(server.url)
    gate = Gate(worker)
    async with running(worker):
        peer = await server.welcomed()
        await peer.deliver(task := work(1))
        await gate.entered(1)
        for ok in (False, False, True, True):
            await peer.send(Degraded(ok=ok, reason="down"))
        gate.open()
        assert (await peer.next(AckFrame)).receipts == [task.receipt]
        assert peer.count(RedeliverFrame) == 0
    told = [r.getMessage() for r in caplog.records if "store" in r.getMessage()]
    assert told == ["store of the server unavailable: down", "store of the server available again"]
