"""Reconnect storm: after the server was killed, all workers reconnect at once and are admitted a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from taskqueue_server.context.connections import MAX_CONNECTIONS, MAX_STRANGERS
from taskqueue_server.worker_socket.uvicorn_protocol import raise_descriptor_limit
from taskqueue_worker import Worker
from taskqueue_worker.server_link import Backoff
from tests.server.observed import Observed, observed
from tests.server.rude import RawSocket
from tests.server.support import eventually
from tests.worker.fake import running

LARGE = 1000
REAL = 2
SECONDS = 30.0
"""seconds within which all workers must be connected again"""


@pytest.fixture(autouse=True)
def _descriptors() -> Iterator[None]:
    """Raise the descriptor limit of this process and of the server, which inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * LARGE)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Crowd:
    """Lightweight workers that reconnect with the same backoff as real workers."""

    def __init__(self, port: int, size: int) -> None:
        self._port = port
        self.size = size
        self.welcomed = 0
        """number of workers that are connected and welcomed"""
        self.refused = 0
        """number of connections that were refused with close code 1013"""

    async def one(self, number: int) -> None:
        """Run one worker that reconnects whenever its connection ends."""
        backoff = Backoff()
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                await self._visit(f"c{number}", backoff)
            await asyncio.sleep(backoff.next())

    async def _visit(self, name: str, backoff: Backoff) -> None:
        with await RawSocket.opened(self._port, patience=SECONDS) as raw:
            raw.say("hello", worker_id=name, keys=["k"], credit=1)
            if b'"welcome"' in await raw.heard():
                await self._stay(raw, backoff)
            self.refused += raw.closed_with == 1013

    async def _stay(self, raw: RawSocket, backoff: Backoff) -> None:
        backoff.reset()
        self.welcomed += 1
        try:
            while heard := await raw.heard():
                if b'"ping"' in heard:
                    raw.say("pong")
        finally:
            self.welcomed -= 1


async def everybody(it: Observed, crowd: Crowd) -> float:
    """Wait until all workers are connected; return the seconds that this took."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def there() -> bool:
        await asyncio.sleep(0.05)  # More frequent queries would add load to the server.
        found = await it.look()
        assert found.strangers <= MAX_STRANGERS
        return crowd.welcomed == crowd.size and found.connections == crowd.size + REAL

    await eventually(there, SECONDS)
    return loop.time() - began


@pytest.mark.parametrize(
    "size",
    [
        20,
        pytest.param(160, marks=pytest.mark.long),
        pytest.param(LARGE, marks=pytest.mark.chaos),
    ],
)
async def test_all_come_back(size: int) -> None:
    """Fault G7: within 30 seconds all workers are connected again, and then real workers still run tasks.

    Only a limited number connects at a time, and the others are asked to try again later.
    """
    async with observed(lease=20, grace=0.1) as first:
        port, crowd = first.port, Crowd(first.port, size)
        async with AsyncExitStack() as opened:
            for _ in range(REAL):
                await opened.enter_async_context(running(working(first.url)))
            members = [asyncio.create_task(crowd.one(n)) for n in range(size)]
            opened.push_async_callback(gone, members)
            await everybody(first, crowd)
            first.kill()
            await eventually(lambda: crowd.welcomed == 0)
            crowd.refused = 0
            async with observed(lease=20, grace=0.1, port=port) as second:
                took = await everybody(second, crowd)
                print(f"{size} connected after {took:.1f} s; {crowd.refused} refused")  # noqa: T201
                assert took < SECONDS
                await second.publish("real", [b'{"n": 1}'] * 20)
                await second.reaches("real", done=20)
                await gone(members)
                await opened.aclose()


def working(url: str) -> Worker:
    """Return a real worker."""
    worker = Worker(url=url, concurrency=2)

    @worker.task("real")
    async def real(n: int) -> int:
        return n

    return worker


async def gone(members: list[asyncio.Task[None]]) -> None:
    """Disconnect all workers of the crowd."""
    for member in members:
        member.cancel()
    await asyncio.gather(*members, return_exceptions=True)


def test_descriptors_for_as_many_as_may_come() -> None:
    """Fault G11: the server raises its descriptor limit to what its sockets need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_descriptor_limit()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = limit if hard == resource.RLIM_INFINITY else hard
        assert limit == min(most, MAX_CONNECTIONS + 2000)
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
