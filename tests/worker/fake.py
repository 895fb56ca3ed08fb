"""A scripted server, and helpers that run a worker next to a test."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from taskqueue_core.errors import TaskQueueError
from taskqueue_core.protocol.frames import (
    SUBPROTOCOL,
    AckFrame,
    Bye,
    ClientFrame,
    DeadLetterFrame,
    Deliver,
    Hello,
    Ping,
    Pong,
    RedeliverFrame,
    RetryFrame,
    ServerFrame,
    SettledFrame,
    Welcome,
    WireDelivery,
    WireLimits,
    WireTask,
    decode_client,
    encode,
)
from taskqueue_worker import Worker

F = TypeVar("F", bound=ClientFrame)
PATIENCE = 30.0
"""seconds after which a hanging test fails"""
_numbers = itertools.count(1)


def work(
    payload: object = None,
    *,
    key: str = "work",
    receipt: str | None = None,
    attempt: int = 1,
    timeout: float | None = None,
) -> WireDelivery:
    """Return a delivery of a new task."""
    number = next(_numbers)
    task = WireTask(id=f"t{number}", key=key, payload=msgspec.Raw(msgspec.json.encode(payload)))
    return WireDelivery(
        receipt=receipt or f"r{number}",
        attempt=attempt,
        delivered_at=0.0,
        timeout=timeout,
        task=task,
    )


def receipts_of(frame: ClientFrame) -> list[str]:
    """Return the receipts that a frame settles."""
    match frame:
        case AckFrame(receipts=receipts) | RedeliverFrame(receipts=receipts):
            return receipts
        case RetryFrame(receipt=receipt) | DeadLetterFrame(receipt=receipt):
            return [receipt]
    return []


class Peer:
    """The server side of one worker's connection."""

    def __init__(self, socket: ServerConnection, hello: Hello) -> None:
        """While ``pongs`` is True, pings are answered; while ``confirms`` is True, settlements are confirmed."""
        self.socket = socket
        self.hello = hello
        self.pongs = True
        self.confirms = True
        self.log: list[ClientFrame] = []
        self.ended = asyncio.Event()
        self._queues: dict[type[object], asyncio.Queue[ClientFrame]] = defaultdict(asyncio.Queue)

    async def welcome(
        self,
        *,
        lease: float = 30.0,
        adopted: list[str] | None = None,
        features: Sequence[str] = (),
        **limits: int,
    ) -> None:
        """Welcome the worker, and adopt all its held receipts unless ``adopted`` is given."""
        await self.send(
            Welcome(
                connection_id="c1",
                lease=lease,
                server="fake",
                limits=WireLimits(**limits),
                adopted=self.hello.holding if adopted is None else adopted,
                features=list(features),
            )
        )

    async def send(self, frame: ServerFrame) -> None:
        """Send one frame."""
        await self.socket.send(encode(frame))

    async def deliver(self, *deliveries: WireDelivery) -> None:
        """Send deliveries in one frame."""
        await self.send(Deliver(deliveries=list(deliveries)))

    async def next(self, kind: type[F]) -> F:
        """Wait for the next frame of this type and return it."""
        async with asyncio.timeout(PATIENCE):
            frame = await self._queues[kind].get()
        assert isinstance(frame, kind)
        return frame

    async def heard(self) -> None:
        """Wait until the worker has read all frames that were sent before."""
        await self.send(Ping(n=99))
        while (await self.next(Pong)).n != 99:
            pass

    def count(self, kind: type[ClientFrame]) -> int:
        """Return how many frames of this type have arrived so far."""
        return sum(isinstance(frame, kind) for frame in self.log)

    def settled(self) -> list[str]:
        """Return all receipts that were settled so far, in order."""
        return [receipt for frame in self.log for receipt in receipts_of(frame)]

    async def end(self) -> None:
        """Wait for the connection to end."""
        async with asyncio.timeout(PATIENCE):
            await self.ended.wait()

    def cut(self) -> None:
        """Break the connection without a close frame."""
        self.socket.transport.abort()

    async def pump(self) -> None:
        """Read and store frames until the connection ends."""
        try:
            async for text in self.socket:
                frame = decode_client(text)
                self.log.append(frame)
                if isinstance(frame, Ping) and self.pongs:
                    await self.send(Pong(n=frame.n))
                if self.confirms and (receipts := receipts_of(frame)):
                    await self.send(SettledFrame(ok=receipts))
                self._queues[type(frame)].put_nowait(frame)
                if isinstance(frame, Bye):
                    break
        except ConnectionClosed:
            pass
        finally:
            self.ended.set()


class FakeServer:
    """A websocket server that passes each connected worker to the test."""

    def __init__(self) -> None:
        """The server listens after `start`."""
        self.port = 0
        self.refuse: HTTPStatus | None = None
        self.handshakes = 0
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._server: Server | None = None

    @property
    def url(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; after a `close`, use the same port again."""
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self.port,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            process_request=self._process,
            ping_interval=None,
            compression=None,
            close_timeout=0.5,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def accept(self) -> Peer:
        """Wait for the next worker that has sent its hello, and return its connection."""
        async with asyncio.timeout(PATIENCE):
            return await self._peers.get()

    async def welcomed(self, *, lease: float = 30.0) -> Peer:
        """Wait for the next worker, welcome it, and return its connection."""
        peer = await self.accept()
        await peer.welcome(lease=lease)
        return peer

    async def _process(self, socket: ServerConnection, _request: Request) -> Response | None:
        self.handshakes += 1
        return None if self.refuse is None else socket.respond(self.refuse, "no\n")

    async def _serve(self, socket: ServerConnection) -> None:
        try:
            hello = decode_client(await socket.recv())
        except (ConnectionClosed, TaskQueueError):
            return
        assert isinstance(hello, Hello)
        peer = Peer(socket, hello)
        self._peers.put_nowait(peer)
        await peer.pump()


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Future[None]]:
    """Run a worker in a thread with its own event loop, so that its handlers cannot block the test.

    The future completes as `Worker.serve` does; a test that expects an error must check it.
    """
    ended: Future[None] = Future()

    def serve_it() -> None:
        try:
            asyncio.run(worker.serve())
        except BaseException as error:  # noqa: BLE001 - the test checks the error
            ended.set_exception(error)
        else:
            ended.set_result(None)

    thread = threading.Thread(target=serve_it)
    thread.start()
    try:
        yield ended
    finally:
        worker.stop(now=True)
        await asyncio.to_thread(thread.join, PATIENCE)
        assert not thread.is_alive()


async def outcome(ended: Future[None]) -> BaseException | None:
    """Wait for the end of the worker and return its error, or None."""
    return await asyncio.to_thread(ended.exception, PATIENCE)
