"""Local HTTP servers that receive callbacks, correctly or not, and helpers that record connection attempts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_dispatch.callbacks.sender import Sender
from taskqueue_dispatch.config import DispatchSettings

LOCAL = "127.0.0.1"
_LINE = b"\r\n"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Call(msgspec.Struct, frozen=True):
    """One HTTP request, as the receiver got it."""

    target: str
    headers: dict[str, str]
    body: bytes
    peer: str


def answer(status: int, body: bytes = b"", **headers: str) -> Script:
    """Return a script that sends a complete response; underscores in header names become hyphens."""
    told = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    head = f"HTTP/1.1 {status} any\r\ncontent-length: {len(body)}\r\n{told}\r\n".encode()
    return raw(head + body)


def raw(text: bytes) -> Script:
    """Return a script that sends these bytes and ends."""

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        await writer.drain()

    return script


async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Send nothing until the client closes the connection."""
    await reader.read()


def drip(text: bytes, then: bytes = b"a", every: float = 0.02) -> Script:
    """Return a script that sends ``text``, and then ``then`` every ``every`` seconds until the client disconnects."""

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        while True:
            await writer.drain()
            writer.write(then)
            await asyncio.sleep(every)

    return script


def flood(status: int, sent: list[int]) -> Script:
    """Return a script that sends a response of 1 GB; it appends the size of each piece sent to ``sent``."""
    size, piece = 1_000_000_000, bytes(65_536)

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status} any\r\ncontent-length: {size}\r\n\r\n".encode())
        while sum(sent) < size:
            writer.write(piece)
            await writer.drain()
            sent.append(len(piece))

    return script


OK = answer(204)


class Receiver:
    """A server that answers each call with the next script, and repeats the last one. It counts all connections."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.touched = 0
        self.open = 0
        self.most = 0
        """largest number of connections open at the same time"""
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.touched += 1
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
                await self._take(reader, writer)
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(_LINE * 2)).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): text.strip()
            for name, _, text in (line.partition(":") for line in head[1:-2])
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        place = min(len(self.calls), len(self.scripts) - 1)
        peer = writer.get_extra_info("peername")[0]
        self.calls.append(Call(head[0].split()[1], headers, body, peer))
        await self.scripts[place](reader, writer)

    async def stop(self) -> None:
        """Cancel the tasks of all open connections."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def receiving(
    *scripts: Script, host: str = LOCAL, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    """Run a receiver; without scripts it answers every call with 204."""
    receiver = Receiver(scripts or [OK])
    server = await asyncio.start_server(receiver.serve, host, port, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        await receiver.stop()
        await server.wait_closed()


@asynccontextmanager
async def receiving_at(
    host: str, other: str, *scripts: Script
) -> AsyncIterator[tuple[Receiver, Receiver]]:
    """Run two receivers at the same port of two addresses; the scripts are for the first one.

    A port that is free at one address may be in use at the other; then another port is tried.
    """
    for attempt in range(20):
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(receiving(*scripts, host=host))
            try:
                second = await stack.enter_async_context(receiving(host=other, port=first.port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or attempt == 19:
                    raise
                continue
            yield first, second
            return


def settings(*receivers: Receiver, **changes: Any) -> DispatchSettings:
    """Return settings that allow plain HTTP callbacks to these receivers on loopback, and to no other place."""
    told: dict[str, Any] = {
        "callback_http": True,
        "callback_networks": ("127.0.0.0/8",),
        "callback_ports": tuple(receiver.port for receiver in receivers) or (443,),
        "callback_timeout": 5.0,
    }
    return DispatchSettings(_env_file=None, **(told | changes))


def fixed(**names: str) -> Callable[[str, int], Awaitable[tuple[str, ...]]]:
    """Return a resolver that knows only these names: underscores become hyphens, and ``.example`` is appended."""
    known = {f"{name.replace('_', '-')}.example": address for name, address in names.items()}

    async def resolve(host: str, _port: int) -> tuple[str, ...]:
        return (known[host],)

    return resolve


@asynccontextmanager
async def sending(backend: Backend, told: DispatchSettings, **values: Any) -> AsyncIterator[Sender]:
    """Run a callback sender. By default it trusts no certificate authority, because loading the system's is slow."""
    sender = Sender(backend, told, **{"tls": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)} | values)
    task = asyncio.create_task(sender.run())
    try:
        yield sender
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


_heard: list[list[Any]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        for one in _heard:
            one.append(arguments[1])


@contextmanager
def connections() -> Iterator[list[Any]]:
    """Record the address of every connection that this process tries to open inside the ``with`` block."""
    if not hasattr(sys, "_taskqueue_hears"):
        sys.addaudithook(_hear)
        sys._taskqueue_hears = True  # type: ignore[attr-defined] # an audit hook cannot be removed: add it once
    found: list[Any] = []
    _heard.append(found)
    try:
        yield found
    finally:
        _heard.remove(found)
