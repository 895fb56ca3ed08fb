"""Helpers for tests of the Redis connection: links with short time limits, and a fake server with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

from hiredis import Reader

from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.client import RedisClient
from tests.chaos.proxy import FaultProxy

KEY = "{t:0}"
SHORT = {"connect_timeout": 0.5, "answer_timeout": 0.5, "operation_timeout": 2.0}
Answers = Callable[[int, Sequence[bytes]], "bytes | None"]


def settings_for(url: str, **values: Any) -> RedisSettings:
    """Return settings with just these values, without reading the environment."""
    return RedisSettings.model_validate({"url": url, **values})


@asynccontextmanager
async def linked(url: str, **values: Any) -> AsyncIterator[RedisClient]:
    """Open a link with these settings, and close it afterwards."""
    link = RedisClient(settings_for(url, **values))
    try:
        yield link
    finally:
        await link.aclose()


@asynccontextmanager
async def raw(link: RedisClient) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Open a separate connection, and yield a function that sends one command and returns or raises its reply."""
    _, connection = await link.listener()
    try:
        yield connection.call
    finally:
        await connection.aclose()


class Puppet:
    """A fake Redis server.

    ``answers(n, words)`` returns the bytes sent for the n-th command, or None to close the connection. Commands of
    the login are answered with ``login`` and are not counted.
    """

    login = b"+OK\r\n"

    def __init__(self, answers: Answers) -> None:
        self.heard: list[list[bytes]] = []
        self.called = asyncio.Event()
        self.connections = 0
        self._answers = answers
        self._server: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self._quiet = asyncio.Event()

    @property
    def url(self) -> str:
        """The URL of the fake server."""
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._open)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._quiet.clear()
        for writer in tuple(self._open):
            writer.transport.abort()
        await self._server.wait_closed()
        if self._open:
            await self._quiet.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.connections += 1
        parser = Reader()
        try:
            while data := await reader.read(65_536):
                parser.feed(data)
                while (words := parser.gets()) is not False:
                    if words[0] in {b"CLIENT", b"AUTH", b"SELECT"}:
                        writer.write(self.login)
                        continue
                    self.heard.append(words)
                    self.called.set()
                    answer = self._answers(len(self.heard), words)
                    if answer is None:
                        return
                    writer.write(answer)
        except ConnectionError:
            pass
        finally:
            self._open.discard(writer)
            writer.close()
            if not self._open:
                self._quiet.set()


@asynccontextmanager
async def linked_to_puppet(
    answers: Answers, **values: Any
) -> AsyncIterator[tuple[Puppet, RedisClient]]:
    """Start a fake server, and open a link to it with short time limits."""
    async with Puppet(answers) as puppet, linked(puppet.url, **SHORT | values) as link:
        yield puppet, link


@asynccontextmanager
async def linked_by_proxy(
    port: int, **values: Any
) -> AsyncIterator[tuple[FaultProxy, RedisClient]]:
    """Open a link to a server through a proxy that can inject faults, and return both."""
    async with AsyncExitStack() as opened:
        proxy = await opened.enter_async_context(FaultProxy(("127.0.0.1", port)))
        url = f"redis://127.0.0.1:{proxy.address[1]}"
        yield proxy, await opened.enter_async_context(linked(url, **values))
