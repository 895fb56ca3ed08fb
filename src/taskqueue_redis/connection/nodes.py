"""One Redis server, as this process uses it: one connection for all, and a few that are lent out."""

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
    """Growing pauses: 50 ms, doubled each time up to 1 s, of which a random half is waited at least.

    The jitter keeps the processes that lost one server apart when it comes back; the cap keeps what is waited
    after it is back well below the five seconds in which consumers resume.
    """

    _FIRST = 0.05
    _MOST = 1.0

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._tries = 0

    def reset(self) -> None:
        """Begin anew."""
        self._tries = 0

    def next(self) -> float:
        """Return the seconds to wait before the next try."""
        full: float = min(self._MOST, self._FIRST * 2 ** min(self._tries, 10))
        self._tries += 1
        return full * (0.5 + 0.5 * self._chance())


class Node:
    """A server. Connects when it is first used, and again after a loss, never more often than a `Backoff` allows."""

    def __init__(
        self,
        place: HostAddress,
        settings: RedisSettings,
        reopened: Callable[[], None] | None = None,
    ) -> None:
        """Do no input or output. ``reopened`` is called when the connection that all share is made another time."""
        self.place = place
        self.wire: Wire | None = None
        """the connection that all callers share, if there is one; it may be lost"""
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
        """Return the shared connection, made anew if need be, by one attempt for all who ask. Raises `Unreachable`."""
        if self.wire is not None and self.wire.open:
            return self.wire
        wire = await self._opening.join()
        if wire is None:
            raise link_closed()
        return wire

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[Wire]:
        """Lend a connection for one caller alone, once there is one to spare. Raises `Unreachable`.

        One that comes back with an answer due is closed, so the next caller cannot get that.
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
                    wire.give_up("a caller left with an answer due")

    @property
    def in_use(self) -> bool:
        """Whether anybody waits for an answer, or has borrowed a connection."""
        return bool(self._lent) or not (self.wire is None or self.wire.lost or self.wire.idle)

    def retire(self) -> None:
        """Close every connection, of a server that is not part of the installation any more."""
        for wire in (*self._idle, *filter(None, [self.wire])):
            wire.give_up("the server is not part of the installation any more")
        self._idle.clear()

    async def aclose(self) -> None:
        """Close every connection; who waits for an answer gets `Lost`. Idempotent."""
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
    """Open a connection that its caller owns. Raises `Unreachable`."""
    try:
        return await open_wire(place, settings, sentinel=sentinel)
    except _CONNECTING as error:
        raise Unreachable(*judge_connecting(error)) from None


def link_closed() -> Unreachable:
    """Return what is raised when nothing is to be opened any more."""
    return Unreachable(Policy.SEEK, NotReached("the link was closed"))
