"""Reconnecting after the loss of the server: no task is lost or run twice."""

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
    """A handler that waits until the test opens it."""

    def __init__(self, worker: Worker) -> None:
        """The handler is registered for the key ``work``."""
        self.calls: list[int] = []
        self.cancelled = 0
        self._open = threading.Event()
        worker.task("work")(self.wait)

    async def wait(self, n: int) -> int:
        """Wait until the test opens the gate."""
        self.calls.append(n)
        try:
            await until(self._open.is_set)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return n

    def open(self) -> None:
        """Let all calls of the handler return."""
        self._open.set()

    async def entered(self, count: int) -> None:
        """Wait until the handler was called ``count`` times."""
        await until(lambda: len(self.calls) >= count)


async def test_a_running_task_survives_the_loss_of_its_connection(server: FakeServer) -> None:
    """REV-E3, fault E5: after a broken connection the worker reconnects at once, and acks its running task there."""
    pauses = itertools.count()
    worker = Worker(url=server.url, concurrency=3, uniform=lambda: float(next(pauses)))
    gate = Gate(worker)
    async with running(worker):
        peer = await server.welcomed()
        tasks = [work(n) for n in range(2)]
        await peer.deliver(*tasks)
        await gate.entered(2)
        peer.cut()
        peer = await server.accept()
        assert next(pauses) <= 1  # at most 0.1 seconds, and the grace of a server is 0.5 seconds
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
    """Fault A2, fault E2: if the confirmation of an ack is lost, the worker sends the ack again.

    The handler does not run again.
    """
    worker = Worker(url=server.url)
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
    """Fault G5: an outcome whose receipt the server does not adopt is dropped."""
    worker = Worker(url=server.url)
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
    """Fault A6: while the server is down, the worker retries with few log messages.

    It sends all outcomes once the server is back.
    """
    caplog.set_level(logging.INFO, LOGGER)
    worker = Worker(url=server.url, uniform=lambda: 0.0)
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
    """A worker can start before its server; it logs this once and keeps trying."""
    await server.close()
    worker = Worker(url=server.url)
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
    """Fault A7: a worker grants a draining server no credit, settles its tasks there, and then reconnects."""
    worker = Worker(url=server.url)
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
    """Fault A7, G13: a task that is still running when the server stops is offered to the next server."""
    worker = Worker(url=server.url)
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
    """Fault K1: a refused token, a missing right or an unsupported protocol ends the worker without a retry."""
    server.refuse = HTTPStatus(status)
    worker = Worker(url=server.url, token="secret")
    Gate(worker)
    async with running(worker) as ended:
        error = await outcome(ended)
        assert isinstance(error, WorkerRefused)
        assert f"HTTP {status}" in str(error)
        assert "secret" not in str(error)
        assert server.handshakes == 1


async def test_a_token_that_is_refused_later_ends_the_worker(server: FakeServer) -> None:
    """Fault K1: if the server closes with 4401, the worker ends and cancels its running handlers.

    Their outcomes could not be sent.
    """
    worker = Worker(url=server.url, token="secret")
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
    """After a close with 4400, the worker reconnects with a growing delay and never at once."""
    worker = Worker(url=server.url, uniform=lambda: 1.0)
    Gate(worker)
    async with running(worker):
        began = time.perf_counter()
        for _ in range(2):
            peer = await server.welcomed()
            await peer.socket.close(CLOSE_PROTOCOL, "no")
        await server.welcomed()
        assert time.perf_counter() - began >= 0.1 + 0.2


async def test_a_server_that_breaks_the_protocol_is_left(server: FakeServer) -> None:
    """Fault G9: a malformed frame of the server ends the connection with a protocol error.

    The worker then reconnects.
    """
    worker = Worker(url=server.url)
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
    """Fault G14: during an outage of the store, running tasks continue and the connection stays.

    The start and the end of the outage are logged once each.
    """
    caplog.set_level(logging.INFO, LOGGER)
    worker = Worker(url=server.url)
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
    assert told == [
        "the server's store is unavailable: down",
        "the server's store is available again",
    ]
