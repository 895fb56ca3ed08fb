"""The transports to servers. Each server has its own transport, which keeps connections open for later requests.

A transport shared by all servers would search all connections for each request. One server has few slots, and
therefore few connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx2

from taskqueue_dispatch.endpoint_client.address_pinning import FAILURE_SECONDS, AddressPin
from taskqueue_dispatch.endpoint_policy import EndpointPolicy
from taskqueue_dispatch.outbound_http.dns import CachedLookup, Resolve

_IDLE = 2.0
"""seconds for which an idle connection is kept; servers keep it longer (uvicorn: 5 s), so they rarely close it first"""
_MAX_UNUSED = 256
"""maximum number of transports that are kept without a running request"""
_UNUSED = 60.0
"""seconds after which an unused transport is closed; longer than the default ``health_interval``"""
_UNANSWERED = 60.0
"""seconds after which a connection ends if the other machine does not respond"""


@dataclass(eq=False)
class ServerTransport:
    """The transport of one server, and the number of calls that use it."""

    transport: httpx2.AsyncHTTPTransport
    pin: AddressPin | None
    """``None`` unless the host name must be resolved and checked"""
    calls: int = 0
    unused_since: float = 0.0
    discarded: bool = False


class Transports:
    """The transports by origin (scheme, host and port). Use them in one event loop only."""

    def __init__(
        self, secured: Callable[[], ssl.SSLContext], policy: EndpointPolicy, resolve: Resolve
    ) -> None:
        """Create an empty collection. ``secured`` creates the TLS context when a server with TLS is first used."""
        self._secured = functools.cache(secured)
        self._policy = policy
        self._lookup = CachedLookup(resolve, failures=FAILURE_SECONDS)
        # This context is used for http only, so it trusts no certificate.
        self._no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._used: dict[str, ServerTransport] = {}
        self._unused: OrderedDict[str, ServerTransport] = OrderedDict()

    @contextlib.asynccontextmanager
    async def to(self, origin: str) -> AsyncIterator[ServerTransport]:
        """Yield the transport of an origin, and keep it open until the block ends."""
        server = self._used.get(origin) or self._unused.pop(origin, None) or self._new(origin)
        self._used[origin] = server
        server.calls += 1
        try:
            yield server
        finally:
            server.calls -= 1
            if not server.calls:
                await self._put_back(origin, server)

    async def aclose(self) -> None:
        """Close unused transports now, and the others when their last call has ended.

        Later calls open new transports.
        """
        for server in self._used.values():
            server.discarded = True
        self._used.clear()
        while self._unused:
            await self._close_oldest()
        await self._lookup.aclose()

    def _new(self, origin: str) -> ServerTransport:
        host = httpx2.URL(origin).raw_host.decode("ascii")
        checked = self._policy.must_resolve(host)
        return ServerTransport(
            httpx2.AsyncHTTPTransport(
                verify=self._secured() if origin.startswith("https:") else self._no_tls,
                trust_env=False,
                # Do not limit connections, so that no call has to wait for one. The number of slots limits the calls.
                limits=httpx2.Limits(
                    max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE
                ),
                socket_options=_keepalive_options(),
            ),
            AddressPin(host, self._policy, self._lookup) if checked else None,
        )

    async def _put_back(self, origin: str, server: ServerTransport) -> None:
        if server.discarded:
            await server.transport.aclose()
            return
        now = asyncio.get_running_loop().time()
        server.unused_since = now
        self._unused[origin] = self._used.pop(origin)
        while self._unused and self._too_many(now):
            await self._close_oldest()

    def _too_many(self, now: float) -> bool:
        oldest = next(iter(self._unused.values()))
        return len(self._unused) > _MAX_UNUSED or oldest.unused_since < now - _UNUSED

    async def _close_oldest(self) -> None:
        _, server = self._unused.popitem(last=False)
        await server.transport.aclose()


def _keepalive_options() -> list[tuple[int, int, int]]:
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
