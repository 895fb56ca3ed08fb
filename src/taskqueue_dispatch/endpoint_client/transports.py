"""A transport for each server: its connections are kept for its next calls, and no call looks at those of others.

A pool of connections looks at all of them for each request. A server has few slots, and so few connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import httpx2

from taskqueue_dispatch.endpoint_client.address_pinning import Pin, Pins

_IDLE = 2.0
"""seconds; less than a server keeps idle connections (uvicorn: 5), so that few calls meet one that is closing"""
_SERVERS = 256
"""that nobody calls just now, and whose transports are kept all the same"""
_UNUSED = 60.0
"""seconds after which a transport is closed that nobody has used: more than there are between two health checks"""
_UNANSWERED = 60.0
"""seconds after which a connection ends whose other side's machine is gone, or cut off"""


class Way:
    """The way to a server, and who uses it."""

    def __init__(self, transport: httpx2.AsyncHTTPTransport, pin: Pin | None) -> None:
        """``pin`` is for a name that has to be followed."""
        self.transport = transport
        self.pin = pin
        self.calls = 0
        self.unused_since = 0.0
        self.discarded = False


class Transports:
    """Transports by origin. One event loop."""

    def __init__(self, secured: Callable[[], ssl.SSLContext], pins: Pins) -> None:
        """Do no input or output. ``secured`` is called once, for the first server with TLS."""
        self._secured = secured
        self._pins = pins
        self._tls: ssl.SSLContext | None = None
        self._no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody
        self._used: dict[str, Way] = {}
        self._unused: OrderedDict[str, Way] = OrderedDict()

    @contextlib.asynccontextmanager
    async def to(self, origin: str) -> AsyncIterator[Way]:
        """Give the way to an origin, whose transport nobody closes meanwhile."""
        retained = self._used.get(origin) or self._unused.pop(origin, None) or self._new(origin)
        self._used[origin] = retained
        retained.calls += 1
        try:
            yield retained
        finally:
            retained.calls -= 1
            if not retained.calls:
                await self._rest(origin, retained)

    async def aclose(self) -> None:
        """Close what no call uses, and the others once their last call has ended. Later calls open new ones."""
        for retained in self._used.values():
            retained.discarded = True
        self._used.clear()
        while self._unused:
            await self._close_oldest()

    def _new(self, origin: str) -> Way:
        return Way(
            httpx2.AsyncHTTPTransport(
                verify=self._context() if origin.startswith("https:") else self._no_tls,
                trust_env=False,
                # A call waits for no other one's connection, and slots bound the calls.
                limits=httpx2.Limits(
                    max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE
                ),
                socket_options=_watched(),
            ),
            self._pins.of(httpx2.URL(origin).raw_host.decode("ascii")),
        )

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = self._secured()
        return self._tls

    async def _rest(self, origin: str, retained: Way) -> None:
        if retained.discarded:
            await retained.transport.aclose()
            return
        now = asyncio.get_running_loop().time()
        retained.unused_since = now
        self._unused[origin] = self._used.pop(origin)
        while self._unused and self._too_many(now):
            await self._close_oldest()

    def _too_many(self, now: float) -> bool:
        oldest = next(iter(self._unused.values()))
        return len(self._unused) > _SERVERS or oldest.unused_since < now - _UNUSED

    async def _close_oldest(self) -> None:
        _, retained = self._unused.popitem(last=False)
        await retained.transport.aclose()


def _watched() -> list[tuple[int, int, int]]:
    tcp = {
        "TCP_KEEPIDLE": 15,
        "TCP_KEEPINTVL": 5,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(_UNANSWERED * 1000),
    }
    known = [(getattr(socket, name), value) for name, value in tcp.items() if hasattr(socket, name)]
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        *((socket.IPPROTO_TCP, name, value) for name, value in known),
    ]
