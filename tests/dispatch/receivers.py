"""Receivers of callbacks on this machine, polite ones and rude ones, and traps that nobody must ever touch."""

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
    """One request, as it came."""

    target: str
    headers: dict[str, str]
    body: bytes
    peer: str


def answer(status: int, body: bytes = b"", **headers: str) -> Script:
    """A whole answer; underscores in names stand for hyphens."""
    told = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    head = f"HTTP/1.1 {status} any\r\ncontent-length: {len(body)}\r\n{told}\r\n".encode()
    return raw(head + body)


def raw(text: bytes) -> Script:
    """Bytes, and then the end."""

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        await writer.drain()

    return script


async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Say nothing until the other side leaves."""
    await reader.read()


def drip(text: bytes, then: bytes = b"a", every: float = 0.02) -> Script:
    """Some bytes, then one more now and then until the other side leaves."""

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        while True:
            await writer.drain()
            writer.write(then)
            await asyncio.sleep(every)

    return script


def flood(status: int, sent: list[int]) -> Script:
    """An answer of 1 GB; ``sent`` grows by what was taken."""
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
    """Answers its calls in turn as it is told, and then always as the last time. Counts all that touches it."""

    def __init__(self, scripts: Sequence[Script]) -> None:
        self.scripts = list(scripts)
        self.calls: list[Call] = []
        self.touched = 0
        self.open = 0
        self.most = 0
        """connections at a time"""
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one connection."""
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
        """End what is still open."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def receiving(
    *scripts: Script, host: str = LOCAL, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    """A receiver that listens; without scripts it takes every call."""
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
    """Two receivers at one port of two addresses; the scripts are the first one's.

    A port that is free at one address may be in use at the other: then another port is tried.
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
    """Settings of a sender that may call receivers on loopback, by plain http, and nobody else."""
    told: dict[str, Any] = {
        "callback_http": True,
        "callback_networks": ("127.0.0.0/8",),
        "callback_ports": tuple(receiver.port for receiver in receivers) or (443,),
        "callback_timeout": 5.0,
    }
    return DispatchSettings(_env_file=None, **(told | changes))


def fixed(**names: str) -> Callable[[str, int], Awaitable[tuple[str, ...]]]:
    """A resolver that knows these names (with hyphens for underscores, below ``.example``), each by one address."""
    known = {f"{name.replace('_', '-')}.example": address for name, address in names.items()}

    async def resolve(host: str, _port: int) -> tuple[str, ...]:
        return (known[host],)

    return resolve


@asynccontextmanager
async def sending(backend: Backend, told: DispatchSettings, **values: Any) -> AsyncIterator[Sender]:
    """A sender that runs. It trusts no authority, unless it is told: to load the system's takes long."""
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
    """All places that this process tries to connect to meanwhile, whether anything listens there or not."""
    if not hasattr(sys, "_taskqueue_hears"):
        sys.addaudithook(_hear)
        sys._taskqueue_hears = True  # type: ignore[attr-defined] # a hook is for good: one is enough
    found: list[Any] = []
    _heard.append(found)
    try:
        yield found
    finally:
        _heard.remove(found)
