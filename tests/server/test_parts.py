"""Parts of a connection, one by one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.websockets import WebSocketDisconnect

from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.server_session import ServerSession
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from taskqueue_server.worker_socket.sender import DeliverySender
from taskqueue_server.worker_socket.session import adopt
from taskqueue_server.worker_socket.websocket import ABORT, ConnectionClosed, WebSocketChannel
from tests.server.support import eventually


class Socket:
    """A websocket that does as it is told."""

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
        """Note it."""
        self.aborted = True

    async def receive(self) -> Any:
        """Return what the test has put there."""
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def send_text(self, text: str) -> None:
        """Wait as a full buffer does."""
        await self.writable.wait()
        if self.error:
            raise self.error
        self.sent.append(text)

    async def close(self, code: int, reason: str) -> None:
        """Wait likewise."""
        await self.writable.wait()
        self.closed = (code, reason)


def channel(socket: Any, seconds: float = 1.0) -> WebSocketChannel:
    """A channel over a socket."""
    return WebSocketChannel(socket, seconds)


def noted() -> OutageRetry:
    """A link to the store that tells nobody."""

    async def tell(ok: bool, reason: str) -> None:  # noqa: FBT001 - as the link calls it
        pass

    return OutageRetry(tell)


class TestChannel:
    """Every way to end is one error."""

    @pytest.mark.parametrize("error", [WebSocketDisconnect(1006), RuntimeError("closed already")])
    async def test_sends_after_the_end(self, error: Exception) -> None:
        """Fault G13: both errors that servers raise mean the same, and others learn of it."""
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
        """Fault G1: for all who wait for their turn."""
        socket = Socket()
        socket.writable.clear()
        it = channel(socket, 0.05)
        answers = await asyncio.gather(it.send("a"), it.send("b"), return_exceptions=True)
        assert [type(answer) for answer in answers] == [ConnectionClosed, ConnectionClosed]
        assert socket.aborted

    async def test_a_cancelled_send_leaves_its_turn(self) -> None:
        """Fault E4: cancelling at the wait holds up nobody."""
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
        """It is broken then."""
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
        """What the peer meant by its close."""
        socket = Socket()
        socket.messages.put_nowait({"type": "websocket.disconnect", "code": code})
        with pytest.raises(ConnectionClosed) as caught:
            await channel(socket).receive()
        assert (caught.value.code, caught.value.orderly) == (code, orderly)


class TestSender:
    """Fault E4: whenever it is stopped or cancelled, every delivery is somewhere."""

    async def start(
        self, credit: int = 5
    ) -> tuple[MemoryBackend, ServerSession, DeliverySender, Socket, Any]:
        """A pump of its own."""
        backend = MemoryBackend()
        socket: Any = Socket()
        session = ServerSession()
        session.feed(f'{{"type":"hello","worker_id":"w","keys":["k"],"credit":{credit}}}')
        session.welcome("c", 1.0, "1")
        subscription = backend.subscribe(["k"], "w")
        pump = DeliverySender(session, subscription, channel(socket), noted())
        task = asyncio.create_task(pump.run())
        await asyncio.sleep(0)
        return backend, session, pump, socket, task

    async def test_stopped_while_it_waits(self) -> None:
        """It ends by itself."""
        _, session, pump, _, task = await self.start()
        session.drain(1.0)
        pump.stop()
        pump.stop()
        await asyncio.wait_for(task, 1)

    async def test_stopped_and_cancelled_at_once(self) -> None:
        """The cancellation is not taken for the stop."""
        _, session, pump, _, task = await self.start()
        session.drain(1.0)
        pump.stop()
        task.cancel()
        await asyncio.wait([task], timeout=1)
        assert task.cancelled()

    async def test_stopped_without_credit(self) -> None:
        """It need not be waiting for the store."""
        _, session, pump, _, task = await self.start(credit=0)
        session.drain(1.0)
        pump.stop()
        await asyncio.wait_for(task, 1)

    async def test_cancelled_while_it_sends(self) -> None:
        """What was not sent is handed back and off the books."""
        backend, session, _, socket, task = await self.start()
        socket.writable.clear()
        await backend.publisher.publish(Task(key="k"), Task(key="k"))
        await eventually(lambda: session.busy)
        task.cancel()
        await asyncio.wait([task], timeout=1)
        assert session.busy == 0
        assert (await backend.control.ledger("k")).waiting == 2


async def test_what_is_adopted_fits_into_the_welcome() -> None:
    """The longest receipts in the greatest number make no frame beyond the limit."""
    receipts = [f"{n:05}" + "r" * 195 for n in range(LIMITS.credit)]
    asked: list[str] = []

    class Subscription:
        async def adopt(self, *receipts: str) -> tuple[None, ...]:
            asked.extend(receipts)
            return (None,) * len(receipts)

    subscription: Any = Subscription()
    assert await adopt(MemoryBackend(), subscription, receipts, noted()) == ()
    assert 1000 < len(asked) < len(receipts)
    assert len(msgspec.json.encode(asked)) < LIMITS.frame
