"""Run a real server in this process, talk to it as a raw worker, and wait for conditions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import httpx2
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from taskqueue_core.backend import Backend
from taskqueue_core.config import Settings
from taskqueue_core.hooks import Hooks, Identity, hookimpl
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.protocol.frames import SUBPROTOCOL
from taskqueue_core.tasks import Ledger, State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess, create_app
from taskqueue_server.context.server import ServerContext
from taskqueue_server.routing.extensions import Extension
from tests.clock import JumpingLoop, LoopClock

PROBLEM = "application/problem+json"
SECONDS = 5.0
"""seconds before a wait fails, although the events take milliseconds"""


def settings(**changes: Any) -> Settings:
    """Return settings for a fast server on a free port, which ignore the environment and settings files."""
    quick: dict[str, Any] = {"port": 0, "lease": 3.0, "grace": 0.2, "drain": 0.5}
    return Settings.model_construct(
        **{**Settings.model_construct().model_dump(), **quick, **changes}
    )


async def eventually(
    condition: Callable[[], Awaitable[Any]] | Callable[[], Any], seconds: float = SECONDS
) -> Any:
    """Return the first true result of a condition; fail if the condition does not become true in time."""
    loop = asyncio.get_running_loop()
    pause = seconds / 50 if isinstance(loop, JumpingLoop) else 0.005
    end = loop.time() + seconds
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        assert loop.time() < end, "the condition did not become true in time"
        await asyncio.sleep(pause)


class Running:
    """A running server together with its backend."""

    def __init__(self, server: ServerProcess, backend: Backend) -> None:
        self.server = server
        self.backend = backend
        self.ended: asyncio.Task[None] | None = None

    @property
    def context(self) -> ServerContext:
        """State that the connections of the server share."""
        assert self.server.context is not None
        return self.server.context

    @property
    def ws(self) -> str:
        """Address of the worker websocket."""
        return self.server.url.replace("http", "ws") + "/v1/socket"

    @property
    def port(self) -> int:
        """Port on which the server listens."""
        return int(self.server.url.rsplit(":", 1)[1])

    async def answers(
        self,
        *pieces: bytes,
        end: bool = False,
        seconds: float = SECONDS,
        patience: float | None = None,
    ) -> list[int]:
        """Send raw bytes and return the HTTP status codes of the responses.

        Read until the server closes the connection or, if ``patience`` is given, for that many seconds.
        """
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        said = bytearray()
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if end:
                writer.write_eof()
            async with asyncio.timeout(patience or seconds):
                while some := await reader.read(65536):
                    said += some
        except ConnectionError:
            pass
        except TimeoutError:
            assert patience, "the server did not close the connection"
        finally:
            writer.close()
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", said)]

    def worker(
        self,
        worker_id: str = "w1",
        *keys: str,
        headers: Mapping[str, str] | None = None,
        **hello: Any,
    ) -> Worker:
        """Return a worker that sends its hello when it is entered; ``headers`` are the headers of its handshake."""
        hello = {"worker_id": worker_id, "keys": keys or ("k",), **hello}
        return Worker(self.ws, hello, headers)

    def socket(self, *, query: str = "", **options: Any) -> Any:
        """Return a websocket that has sent no hello."""
        options = {"subprotocols": [Subprotocol(SUBPROTOCOL)], "compression": None, **options}
        return connect(self.ws + query, proxy=None, ping_interval=None, **options)

    async def publish(self, *ids: str, key: str = "k", **fields: Any) -> None:
        """Publish tasks with these ids."""
        await self.backend.publisher.publish(*(Task(key=key, id=i, **fields) for i in ids))

    async def ledger(self, key: str = "k") -> Ledger:
        """Return the ledger of a queue, which must balance at any time."""
        found: Ledger = await self.backend.control.ledger(key)  # type: ignore[attr-defined]
        assert found.balanced
        return found

    async def count(self, state: State, key: str = "k") -> int:
        """Return the number of tasks in a state."""
        return int(getattr(await self.ledger(key), state.value))

    async def reaches(self, key: str = "k", seconds: float = SECONDS, **counts: int) -> None:
        """Wait until the ledger has these counts."""

        async def there() -> bool:
            found = await self.ledger(key)
            return all(getattr(found, name) == n for name, n in counts.items())

        await eventually(there, seconds)


class Worker:
    """A worker whose frames the test sends and receives by hand."""

    def __init__(
        self, url: str, hello: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        self._url = url
        self._headers = headers
        self._hello = hello
        self.socket: ClientConnection
        self.welcome: dict[str, Any] = {}
        self.passed_over: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self.socket = await connect(
            self._url,
            additional_headers=self._headers,
            subprotocols=[Subprotocol(SUBPROTOCOL)],
            compression=None,
            proxy=None,
            ping_interval=None,
            close_timeout=1,
        )
        try:
            await self.send("hello", **self._hello)
            self.welcome = await self.frame("welcome")
        # ``__aexit__`` does not run if ``__aenter__`` fails, so the socket is closed here.
        except BaseException:
            self.socket.transport.abort()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.socket.close()

    async def send(self, kind: str, **fields: Any) -> None:
        """Send a frame."""
        await self.socket.send(msgspec.json.encode({"type": kind, **fields}).decode())

    async def frame(self, *kinds: str, seconds: float = SECONDS) -> dict[str, Any]:
        """Return the next frame of one of these kinds.

        Pings that arrive before it are answered, and other frames are kept for later calls.
        """
        async with asyncio.timeout(seconds):
            while True:
                frame: dict[str, Any] = msgspec.json.decode(await self.socket.recv())
                if frame["type"] in kinds:
                    return frame
                if frame["type"] == "ping":
                    await self.send("pong", n=frame.get("n", 0))
                else:
                    self.passed_over.append(frame)

    async def deliveries(self, count: int) -> list[dict[str, Any]]:
        """Return the next ``count`` deliveries."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            found += (await self.frame("deliver"))["deliveries"]
        return found

    async def settled(self, count: int) -> tuple[list[str], list[str]]:
        """Return the receipts that were settled and the receipts that were reported as lost, ``count`` in total."""
        ok: list[str] = []
        lost: list[str] = []
        while len(ok) + len(lost) < count:
            frame = await self.frame("settled")
            ok += frame.get("ok", [])
            lost += frame.get("lease_lost", [])
        return ok, lost

    async def closed(self, seconds: float = SECONDS) -> int | None:
        """Return the close code, once the server has closed the connection."""
        async with asyncio.timeout(seconds):
            try:
                while True:
                    self.passed_over.append(msgspec.json.decode(await self.socket.recv()))
            except ConnectionClosed:
                return self.socket.close_code

    def break_off(self) -> None:
        """Break the connection without a close frame, as a killed process does."""
        self.socket.transport.abort()


@asynccontextmanager
async def running(
    backend: Backend | None = None, *, extensions: Sequence[Extension] = (), **changes: Any
) -> AsyncIterator[Running]:
    """Run a server until the end of the block, which must leave no tasks and no connections behind."""
    before = asyncio.all_tasks()
    behind = backend or MemoryBackend(clock=LoopClock())
    server = ServerProcess(behind, settings(**changes), extensions=extensions)
    it = Running(server, behind)
    it.ended = asyncio.create_task(server.run())
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait([ready, it.ended], timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if it.ended.done():
            it.ended.result()
        assert ready.done()
        yield it
    finally:
        ready.cancel()
        server.stop()
        await asyncio.wait_for(it.ended, 2 * SECONDS)
        left = asyncio.all_tasks() - before
        assert not left, left


@asynccontextmanager
async def http(it: Running, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Return an HTTP client of a running server.

    It does not load CA certificates, which is slow, unless the options require it.
    """
    told: dict[str, Any] = {"trust_env": False, "verify": False, **options}
    async with httpx2.AsyncClient(base_url=it.server.url, **told) as client:
        yield client


class Door:
    """An authentication plugin that identifies tokens with a function of the test."""

    def __init__(self, know: Callable[[str], Identity | None]) -> None:
        self._know = know

    @hookimpl
    def authenticate(self, token: str | None) -> Identity | None:
        """Return the identity of the token, or None if the token is not accepted."""
        return self._know(token) if token else None


@asynccontextmanager
async def app_client(
    backend: Backend, know: Callable[[str], Identity | None] | None = None
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return an HTTP client of a running application, without a network.

    If ``know`` is given, the server requires tokens, and ``know`` returns the identity of a token.
    """
    hooks = Hooks()
    if know is not None:
        hooks.register(Door(know))
    app = create_app(InstrumentedBackend(backend, hooks), settings())
    transport = httpx2.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8420") as client,
    ):
        yield client


def receipts(deliveries: list[dict[str, Any]]) -> list[str]:
    """Return the receipts of deliveries."""
    return [delivery["receipt"] for delivery in deliveries]


def problem(answer: httpx2.Response, status: int, code: str, field: str | None = None) -> Any:
    """Check that a response is a problem document, which has a fixed shape and contains no stack trace."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    body = answer.json()
    assert body["status"] == status
    assert body["code"] == code
    assert body.get("field") == field
    assert set(body) <= {"type", "title", "status", "detail", "code", "field", "reason"}
    assert "Traceback" not in answer.text
    return body
