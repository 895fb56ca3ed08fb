"""Leases, jobs and clients for tests of GPU servers, and raw socket servers that violate HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from taskqueue_core.capabilities import Endpoint, Permit, SlotLease
from taskqueue_core.tasks import Task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.models import ModelConfig, ModelType

SYNC = ModelConfig(poll_endpoint_template="/status/{id}")
ASYNC = ModelConfig(model_type=ModelType.ASYNC, poll_endpoint_template="/status/{id}")
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""how a raw server answers a connection, after it has read a request"""


def lease_of(url: str) -> SlotLease:
    """Return a lease of a slot on the GPU server at this URL."""
    return SlotLease(
        model="flux",
        server="one",
        url=url,
        holder="h",
        token="token-1",
        fence=1,
        state=Permit.ASSIGNED,
        expires_at=0.0,
    )


def endpoint_of(url: str) -> Endpoint:
    """Return an endpoint at this URL."""
    return Endpoint(model="flux", server="one", url=url, slots=1)


def task_of(job: str = "job-1", payload: object = None, **headers: str) -> Task:
    """Return a job's task for the model "flux"."""
    return Task.of("dispatch:flux", payload, id=job, headers=headers)


@asynccontextmanager
async def calling(*, tls_ca: Path | None = None, **values: Any) -> AsyncIterator[EndpointClient]:
    """Yield an endpoint client, and close it at the end."""
    settings = DispatchSettings(_env_file=None, **values)
    caller = EndpointClient(settings, tls_ca=tls_ca)
    try:
        yield caller
    finally:
        await caller.aclose()


class Trap:
    """A server on a plain socket. It counts connections and records the requests that it has received."""

    def __init__(self, talk: Talk, scheme: str) -> None:
        self._talk = talk
        self._scheme = scheme
        self.port = 0
        self.connections = 0
        self.requests: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def origin(self) -> str:
        """The scheme, host and port of the server."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The URL to which jobs are sent."""
        return f"{self.origin}/generate"

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task of its own."""
        self.connections += 1
        task = asyncio.create_task(self._live(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while head := await reader.readuntil(b"\r\n\r\n"):
                    lines = head.lower().split(b"\r\n")
                    told = [line for line in lines if line.startswith(b"content-length:")]
                    size = int(told[0].split(b":")[1]) if told else 0
                    self.requests.append(head + await reader.readexactly(size))
                    await self._talk(reader, writer)
                    await writer.drain()
        finally:
            writer.close()

    async def aclose(self) -> None:
        """Cancel the tasks that serve connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def trap(talk: Talk | bytes, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Trap]:
    """Run a raw server that answers each request with these bytes, or by calling ``talk``."""
    told = talk

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(told, bytes)
        writer.write(told)

    it = Trap(answer if isinstance(talk, bytes) else talk, "http" if tls is None else "https")
    server = await asyncio.start_server(
        it.accept,
        "127.0.0.1",
        0,
        ssl=tls,
        # with the default backlog of 100, a refused connection is retried only after a second
        backlog=1024,
    )
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        server.close()
        await it.aclose()


def response(status: int = 200, body: bytes = b"", *lines: str) -> bytes:
    """Return an HTTP/1.1 response as bytes."""
    head = [f"HTTP/1.1 {status} said", f"content-length: {len(body)}", *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def said(code: int = 200, /, **fields: Any) -> bytes:
    """Return an HTTP response whose body is a JSON object with these fields."""
    return response(code, msgspec.json.encode(fields))


class _Program(uvicorn.Server):
    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        """Wait for an event; uvicorn's own loop would poll ten times a second."""
        await self.ended.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an ASGI application with uvicorn on a free port, and yield its origin."""
    program = _Program(app)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(program.serve([listener]))
    try:
        await program.ready.wait()
        yield origin
    finally:
        program.should_exit = program.force_exit = True
        program.ended.set()
        await serving
