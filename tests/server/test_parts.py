"""Unit tests of the websocket channel and the delivery sender of a connection."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.websockets import WebSocketDisconnect

from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_core.tasks import Delivery, Task
from taskqueue_memory import MemoryBackend
from taskqueue_server.worker_socket.adoption import adopt
from taskqueue_server.worker_socket.sender import DeliverySender
from taskqueue_server.worker_socket.websocket import ABORT, ConnectionClosed, WebSocketChannel
from tests.server.sessions import delivery
from tests.server.support import eventually


class Socket:
    """A fake websocket that the test controls."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.closed: tuple[int, str] | None = None
        self.aborted = False
        self.error: Exception | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.scope = {"extensions": {ABORT: {"abort": self.abort}}}

    def abort(self) -> None:
        """Record the abort."""
        self.aborted = True

    async def receive(self) -> Any:
        """Return the next message that the test has queued, or raise it if it is an exception."""
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send_text(self, text: str) -> None:
        """Send a text, after waiting while the buffer counts as full."""
        await self.writable.wait()
        if self.error:
            raise self.error
        self.sent.append(text)

    async def close(self, code: int, reason: str) -> None:
        """Close, after waiting while the buffer counts as full."""
        await self.writable.wait()
        self.closed = (code, reason)


def channel(socket: Any, seconds: float = 1.0) -> WebSocketChannel:
    """Return a channel over a socket."""
    return WebSocketChannel(socket, seconds)


def noted() -> OutageRetry:
    """Return a retry loop for store calls that notifies no worker about outages."""

    async def tell(ok: bool, reason: str) -> None:  # noqa: FBT001 - OutageRetry passes it by position
        pass

    return OutageRetry(tell)


class TestChannel:
    """Every end of a connection is reported as `ConnectionClosed`."""

    @pytest.mark.parametrize("error", [WebSocketDisconnect(1006), RuntimeError("closed already")])
    async def test_sends_after_the_end(self, error: Exception) -> None:
        """Fault G13: both exceptions that a send on a closed websocket can raise become `ConnectionClosed`.

        A task that waits for the end of the connection is notified.
        """
        socket = Socket()
        socket.error = error
        it = channel(socket)
        waiting = asyncio.create_task(it.lost())
        with pytest.raises(ConnectionClosed) as caught:
            await it.send("a")
        assert not caught.value.orderly
        with pytest.raises(ConnectionClosed) as told:
            await asyncio.wait_for(waiting, 1)
        assert told.value.code == 1006
        socket.messages.put_nowait(error)
        with pytest.raises(ConnectionClosed):
            await it.receive()

    async def test_a_full_buffer_breaks_it_in_the_end(self) -> None:
        """Fault G1: if the peer does not read, all waiting sends fail after a timeout and the connection is aborted."""
        socket = Socket()
        socket.writable.clear()
        it = channel(socket, 0.05)
        answers = await asyncio.gather(it.send("a"), it.send("b"), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ConnectionClosed, ConnectionClosed]
        assert socket.aborted

    async def test_a_cancelled_send_leaves_its_turn(self) -> None:
        """Fault E4: a cancelled send does not block the sends that wait behind it."""
        socket = Socket()
        socket.writable.clear()
        it = channel(socket)
        first, second = asyncio.create_task(it.send("a")), asyncio.create_task(it.send("b"))
        await asyncio.sleep(0)
        first.cancel()
        socket.writable.set()
        await asyncio.wait_for(second, 1)
        assert socket.sent == ["b"]

    async def test_closing_does_not_wait_for_a_reader(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the peer does not read, a close aborts the connection after a timeout."""
        monkeypatch.setattr("taskqueue_server.worker_socket.websocket._CLOSE_SECONDS", 0.05)
        socket = Socket()
        socket.writable.clear()
        await channel(socket).close(1000, "bye")
        assert socket.aborted
        assert socket.closed is None

    @pytest.mark.parametrize(
        ("code", "orderly"),
        [(1000, True), (1001, True), (1005, False), (1006, False), (1009, True), (4000, False)],
    )
    async def test_codes(self, code: int, *, orderly: bool) -> None:
        """The close code determines whether the peer closed the connection in an orderly way."""
        socket = Socket()
        socket.messages.put_nowait({"type": "websocket.disconnect", "code": code})
        with pytest.raises(ConnectionClosed) as caught:
            await channel(socket).receive()
        assert (caught.value.code, caught.value.orderly) == (code, orderly)


class TestSender:
    """Fault E4: however the sender ends, every delivery has either been sent or returned to the queue."""

    async def start(
        self, credit: int = 5
    ) -> tuple[MemoryBackend, ServerSession, DeliverySender, Socket, Any]:
        """Return a running delivery sender and the objects around it."""
        backend = MemoryBackend()
        socket: Any = Socket()
        session = ServerSession()
        session.feed(f'{{"type":"hello","worker_id":"w","keys":["k"],"credit":{credit}}}')
        session.welcome("c", 1.0, "1")
        subscription = backend.subscribe(["k"], "w")
        pump = DeliverySender(
            session, subscription, channel(socket), noted(), asyncio.Event(), backend=backend
        )
        task = asyncio.create_task(pump.run())
        await asyncio.sleep(0)
        return backend, session, pump, socket, task

    async def test_stopped_while_it_waits(self) -> None:
        """A stopped sender ends while it is waiting for deliveries."""
        _, session, pump, _, task = await self.start()
        session.drain(1.0)
        pump.stop()
        pump.stop()
        await asyncio.wait_for(task, 1)

    async def test_stopped_and_cancelled_at_once(self) -> None:
        """A sender that is stopped and cancelled at the same moment ends as cancelled."""
        _, session, pump, _, task = await self.start()
        session.drain(1.0)
        pump.stop()
        task.cancel()
        await asyncio.wait([task], timeout=1)
        assert task.cancelled()

    async def test_stopped_without_credit(self) -> None:
        """A stopped sender ends while it is waiting for credit."""
        _, session, pump, _, task = await self.start(credit=0)
        session.drain(1.0)
        pump.stop()
        await asyncio.wait_for(task, 1)

    async def test_cancelled_while_it_sends(self) -> None:
        """A cancelled sender returns unsent deliveries to the queue and removes them from the session."""
        backend, session, _, socket, task = await self.start()
        socket.writable.clear()
        await backend.publisher.publish(Task(key="k"), Task(key="k"))
        await eventually(lambda: session.busy)
        task.cancel()
        await asyncio.wait([task], timeout=1)
        assert session.busy == 0
        assert (await backend.control.ledger("k")).waiting == 2


async def test_what_is_adopted_fits_into_the_welcome() -> None:
    """Only as many receipts are adopted as fit into a welcome frame, even if the receipts have maximum length."""
    receipts = [f"{n:05}" + "r" * 195 for n in range(LIMITS.credit)]
    asked: list[str] = []

    class Subscription:
        async def adopt(self, *receipts: str, **_: object) -> tuple[None, ...]:
            asked.extend(receipts)
            return (None,) * len(receipts)

    subscription: Any = Subscription()
    assert await adopt(MemoryBackend(), subscription, receipts, noted()) == ()
    assert 1000 < len(asked) < len(receipts)
    assert len(msgspec.json.encode(asked)) < LIMITS.frame


async def test_what_is_adopted_is_bounded_in_bytes() -> None:
    """Row A5: adoption ends once the worker holds more than `Limits.held` bytes, and reads little more than that."""
    large = b'"' + b"x" * (LIMITS.payload - 2) + b'"'

    class Subscription:
        async def adopt(self, *receipts: str, **_: object) -> tuple[Delivery, ...]:
            return tuple(delivery(receipt, large) for receipt in receipts)

    subscription: Any = Subscription()
    named = [f"r{n}" for n in range(2000)]
    adopted = await adopt(MemoryBackend(), subscription, named, noted())
    held = sum(len(one.task.payload) for one in adopted)
    assert LIMITS.held < held <= LIMITS.held + 16 * LIMITS.payload
