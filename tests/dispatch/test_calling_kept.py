"""Tests of how long the endpoint client keeps idle connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from taskqueue_dispatch.endpoint_client import transports
from taskqueue_dispatch.endpoint_client.answers import Answer, Done
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.models import ModelConfig
from tests.dispatch.gpu_support import (
    SYNC,
    Talk,
    Trap,
    calling,
    endpoint_of,
    lease_of,
    said,
    task_of,
    trap,
)
from tests.dispatch.patience import PATIENCE

DONE = said(status="success", result=1)


class Watched:
    """A server that can delay its response, and that reports when the client has closed a connection."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.asked = asyncio.Event()
        self.free = asyncio.Event()
        self.free.set()

    @property
    def talk(self) -> Talk:
        """The function that serves a connection."""
        return self._answer

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        await self.free.wait()
        writer.write(DONE)
        await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        self.ended.set()


async def send(caller: EndpointClient, server: Trap) -> Answer:
    """Send a job to the server."""
    return await caller.send(lease_of(server.url), task_of(), SYNC, attempt=1)


async def test_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was idle for too long is closed and not used again (fault H5)."""
    monkeypatch.setattr(transports, "_IDLE", 0.0)
    watched = Watched()
    async with trap(watched.talk) as server, calling() as caller, asyncio.timeout(PATIENCE):
        for number in range(3):
            watched.ended.clear()
            assert await send(caller, server) == Done(b"1")
            await watched.ended.wait()
            assert server.connections == number + 1


async def test_idle_ones_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that times out while it closes idle connections still closes all of them (fault H5)."""
    monkeypatch.setattr(transports, "_IDLE", 0.05)
    together, ended = asyncio.Barrier(4), asyncio.Barrier(5)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await together.wait()  # wait for four calls, so that each opens a connection of its own
        writer.write(DONE)
        with contextlib.suppress(ConnectionError):
            assert not await reader.read()
        await ended.wait()

    async with trap(answer) as server, calling() as caller, asyncio.timeout(PATIENCE):
        await asyncio.gather(*(send(caller, server) for _ in range(4)))
        await asyncio.sleep(0.1)  # all four connections are idle for too long now
        caller._health = 0.0
        assert await caller.health(endpoint_of(server.url), ModelConfig()) is None
        await ended.wait()
    assert server.connections == 4


async def test_shorter_than_servers() -> None:
    """The client closes idle connections earlier than uvicorn does, which is after 5 seconds (fault H5)."""
    assert transports._IDLE < 5


async def test_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client closes and forgets the connections of a server that is no longer called (fault H5)."""
    left, other = Watched(), Watched()
    async with (
        trap(left.talk) as one, trap(other.talk) as two, calling() as caller, asyncio.timeout(PATIENCE)
    ):  # fmt: skip
        assert await send(caller, one) == Done(b"1")
        assert caller._transports._unused
        # let every unused connection expire at once
        monkeypatch.setattr(transports, "_UNUSED", -1.0)
        assert await send(caller, two) == Done(b"1")
        await left.ended.wait()
        await other.ended.wait()
        assert not caller._transports._unused
        assert not caller._transports._used


async def test_servers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the servers called last keep connections, and a call in progress is never cut off (fault H5)."""
    monkeypatch.setattr(transports, "_MAX_UNUSED", 1)
    slow, first, last = Watched(), Watched(), Watched()
    slow.free.clear()
    async with (
        trap(slow.talk) as zero, trap(first.talk) as one, trap(last.talk) as two, calling() as caller,
        asyncio.timeout(PATIENCE),
    ):  # fmt: skip
        call = asyncio.create_task(send(caller, zero))
        await slow.asked.wait()
        assert await send(caller, one) == Done(b"1")
        assert not first.ended.is_set()
        assert await send(caller, two) == Done(b"1")
        await first.ended.wait()
        assert not last.ended.is_set()
        slow.free.set()
        assert await call == Done(b"1")
        await last.ended.wait()
        assert not slow.ended.is_set()


async def test_closing() -> None:
    """A client can be closed twice, and be used again afterwards (fault H5)."""
    async with trap(DONE) as server, calling() as caller:
        for _ in range(2):
            await send(caller, server)
            await caller.aclose()
            await caller.aclose()
        assert server.connections == 2


async def test_closing_under_a_call() -> None:
    """Closing the client does not cut off a call in progress, whose connection is closed later (fault H2)."""
    watched = Watched()
    watched.free.clear()
    async with trap(watched.talk) as server, calling() as caller, asyncio.timeout(PATIENCE):
        call = asyncio.create_task(send(caller, server))
        await watched.asked.wait()
        await caller.aclose()
        later = asyncio.create_task(send(caller, server))
        watched.free.set()
        assert await call == Done(b"1")
        await watched.ended.wait()
        assert await later == Done(b"1")
        assert server.connections == 2
        await caller.aclose()
        assert not caller._transports._used


async def test_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets use TCP_NODELAY for small requests, and keep-alive to notice a dead host (fault H5)."""
    made: list[socket.socket] = []
    real = asyncio.get_running_loop().create_connection

    async def create(*args: object, **kwargs: object) -> object:
        transport, protocol = await real(*args, **kwargs)  # type: ignore[call-overload]
        made.append(transport.get_extra_info("socket"))
        return transport, protocol

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", create)
    async with trap(DONE) as server, calling() as caller:
        await send(caller, server)
        (one,) = made
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
