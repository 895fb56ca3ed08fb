"""The connections of this process to one Redis server: a shared one, and a few for exclusive use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.background import SingleFlight
from taskqueue_redis.connection.connection import RedisConnection
from taskqueue_redis.connection.failures import NotReached, Policy, Unreachable


class NodeConnector(Protocol):
    """The part of `Connector` that a node uses. Importing `Connector` would import redis-py, which is slow."""

    settings: RedisSettings

    async def open(self, place: HostAddress) -> RedisConnection:
        """Open a connection to a server. Raises `Unreachable`."""


class Backoff:
    """Pauses between retries: 50 ms, doubled each time up to 1 s, and each reduced by up to half at random.

    Because of the jitter, processes that lost the same server do not all reconnect at the same moment. With the cap,
    a consumer resumes well within five seconds of the server's return.
    """

    _FIRST = 0.05
    _MOST = 1.0

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._tries = 0

    def reset(self) -> None:
        """Start again with the shortest pause."""
        self._tries = 0

    def next(self) -> float:
        """Return the number of seconds to wait before the next attempt."""
        full: float = min(self._MOST, self._FIRST * 2 ** min(self._tries, 10))
        self._tries += 1
        return full * (0.5 + 0.5 * self._chance())


class Node:
    """A Redis server with its connections, which are opened on demand. A `Backoff` delays attempts after a failure."""

    def __init__(
        self,
        place: HostAddress,
        connector: NodeConnector,
        reopened: Callable[[], None] | None = None,
    ) -> None:
        """Create the node without connecting. ``reopened`` is called after the shared connection has been replaced."""
        self.place = place
        self.connection: RedisConnection | None = None
        """the shared connection, which may be lost; None before it is opened for the first time"""
        self._connector = connector
        self._reopened = reopened
        self._backoff = Backoff()
        self._not_before = 0.0
        self._opening = SingleFlight(self._share, f"connect to {place}")
        self._places = asyncio.Semaphore(connector.settings.connections)
        self._idle: list[RedisConnection] = []
        self._lent: set[RedisConnection] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"Node({str(self.place)!r})"

    async def reach(self) -> RedisConnection:
        """Return the shared connection. Raises `Unreachable`.

        If there is none or it was lost, all concurrent callers wait for the same attempt to connect.
        """
        if self.connection is not None and self.connection.open:
            return self.connection
        connection = await self._opening.join()
        if connection is None:
            raise link_closed()
        return connection

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[RedisConnection]:
        """Lend a connection to one caller; wait while all connections of the node are lent. Raises `Unreachable`.

        A connection that is returned with an answer pending is closed, so the next caller cannot receive that answer.
        """
        async with self._places:
            while self._idle and not self._idle[-1].open:
                self._idle.pop()
            connection = self._idle.pop() if self._idle else await self._open()
            self._lent.add(connection)
            try:
                yield connection
            finally:
                self._lent.discard(connection)
                if connection.idle and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.give_up("the caller did not wait for an answer")

    @property
    def in_use(self) -> bool:
        """Whether an answer is pending on the shared connection, or another connection is lent."""
        return bool(self._lent) or not (
            self.connection is None or self.connection.lost or self.connection.idle
        )

    def retire(self) -> None:
        """Close the connections that are not lent, because the server no longer belongs to the installation."""
        for connection in (*self._idle, *filter(None, [self.connection])):
            connection.give_up("the server no longer belongs to the installation")
        self._idle.clear()

    async def aclose(self) -> None:
        """Close every connection; calls that wait for an answer raise `Lost`. Idempotent."""
        self._closed = True
        await self._opening.aclose()
        connections = [*self._idle, *self._lent, *filter(None, [self.connection])]
        for connection in connections:
            await connection.aclose()

    async def _share(self) -> RedisConnection:
        first = self.connection is None
        self.connection = await self._open()
        if self._reopened is not None and not first:
            self._reopened()
        return self.connection

    async def _open(self) -> RedisConnection:
        loop = asyncio.get_running_loop()
        if not self._closed and (pause := self._not_before - loop.time()) > 0:
            await asyncio.sleep(pause)
        if self._closed:
            raise link_closed()
        try:
            connection = await self._connector.open(self.place)
        except Unreachable:
            self._not_before = loop.time() + self._backoff.next()
            raise
        self._backoff.reset()
        return connection


def link_closed() -> Unreachable:
    """Return the error for calls that need a connection after `RedisClient.aclose`."""
    return Unreachable(Policy.SEEK, NotReached("the client was closed"))
