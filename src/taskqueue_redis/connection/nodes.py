"""The connections of this process to one Redis server: a shared one, and a few for exclusive use."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from taskqueue_core.errors import ConfigurationError
from taskqueue_redis.addresses import HostAddress
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.background import Flight
from taskqueue_redis.connection.connection import Wire, open_wire
from taskqueue_redis.connection.failures import (
    ErrorReply,
    Lost,
    NotReached,
    Policy,
    Unreachable,
    judge_connecting,
)

_CONNECTING = (OSError, Lost, ErrorReply, ConfigurationError)


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
        settings: RedisSettings,
        reopened: Callable[[], None] | None = None,
    ) -> None:
        """Create the node without connecting. ``reopened`` is called whenever the shared connection was replaced."""
        self.place = place
        self.wire: Wire | None = None
        """the shared connection, which may be lost; None before it is opened for the first time"""
        self._settings = settings
        self._reopened = reopened
        self._backoff = Backoff()
        self._not_before = 0.0
        self._opening = Flight(self._share, f"connect to {place}")
        self._places = asyncio.Semaphore(settings.connections)
        self._idle: list[Wire] = []
        self._lent: set[Wire] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"Node({str(self.place)!r})"

    async def reach(self) -> Wire:
        """Return the shared connection. Raises `Unreachable`.

        If there is none or it was lost, all concurrent callers wait for the same attempt to connect.
        """
        if self.wire is not None and self.wire.open:
            return self.wire
        wire = await self._opening.join()
        if wire is None:
            raise link_closed()
        return wire

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[Wire]:
        """Lend a connection to one caller; wait while all connections of the node are lent. Raises `Unreachable`.

        A connection that is returned with an answer pending is closed, so the next caller cannot receive that answer.
        """
        async with self._places:
            while self._idle and not self._idle[-1].open:
                self._idle.pop()
            wire = self._idle.pop() if self._idle else await self._open()
            self._lent.add(wire)
            try:
                yield wire
            finally:
                self._lent.discard(wire)
                if wire.idle and not self._closed:
                    self._idle.append(wire)
                else:
                    wire.give_up("the caller did not wait for an answer")

    @property
    def in_use(self) -> bool:
        """Whether an answer is pending on the shared connection, or another connection is lent."""
        return bool(self._lent) or not (self.wire is None or self.wire.lost or self.wire.idle)

    def retire(self) -> None:
        """Close the connections that are not lent, because the server no longer belongs to the installation."""
        for wire in (*self._idle, *filter(None, [self.wire])):
            wire.give_up("the server no longer belongs to the installation")
        self._idle.clear()

    async def aclose(self) -> None:
        """Close every connection; calls that wait for an answer raise `Lost`. Idempotent."""
        self._closed = True
        await self._opening.aclose()
        wires = [*self._idle, *self._lent, *filter(None, [self.wire])]
        for wire in wires:
            await wire.aclose()

    async def _share(self) -> Wire:
        first = self.wire is None
        self.wire = await self._open()
        if self._reopened is not None and not first:
            self._reopened()
        return self.wire

    async def _open(self) -> Wire:
        loop = asyncio.get_running_loop()
        if not self._closed and (pause := self._not_before - loop.time()) > 0:
            await asyncio.sleep(pause)
        if self._closed:
            raise link_closed()
        try:
            wire = await open_wire(self.place, self._settings)
        except _CONNECTING as error:
            self._not_before = loop.time() + self._backoff.next()
            raise Unreachable(*judge_connecting(error)) from None
        self._backoff.reset()
        return wire


async def connect(place: HostAddress, settings: RedisSettings, *, sentinel: bool = False) -> Wire:
    """Open a connection that the caller must close. Raises `Unreachable`."""
    try:
        return await open_wire(place, settings, sentinel=sentinel)
    except _CONNECTING as error:
        raise Unreachable(*judge_connecting(error)) from None


def link_closed() -> Unreachable:
    """Return the error for calls that need a connection after `Link.aclose`."""
    return Unreachable(Policy.SEEK, NotReached("the client was closed"))
