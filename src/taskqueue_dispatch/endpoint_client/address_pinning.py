"""Where a server's name leads: looked up and checked for each connection, and nothing else is connected to."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx2

from taskqueue_dispatch.endpoint_client.answers import EndpointReply
from taskqueue_dispatch.endpoint_client.exchange import (
    NotConnectedError,
    NotReachedError,
    exchange,
)
from taskqueue_dispatch.endpoint_policy import Allowed
from taskqueue_dispatch.outbound_http.dns import CachedLookup, Resolve, look_up
from taskqueue_dispatch.outbound_http.errors import NotReached

_SECONDS = 5.0
"""for a look-up"""
_FAILURES = 0.5
"""seconds for which a look-up that failed stands: less than there are between two looks at one server"""
_ADDRESSES = 3
"""of a name that are tried, where one is not connected to"""
_PORT = 0
"""a name has the same addresses at each port: it is looked up once for all"""

ask_the_system: Resolve = partial(look_up, threads="look-up-endpoints")
"""on threads of its own: what clients name for callbacks keeps no server from being found"""


class ElsewhereError(NotReachedError):
    """The server's name leads where no endpoint may be."""


class Pins:
    """Knows which names are to be followed. One event loop."""

    def __init__(self, allowed: Allowed, resolve: Resolve) -> None:
        """Do no input or output."""
        self._allowed = allowed
        self._recently = CachedLookup(resolve, failures=_FAILURES)

    def of(self, host: str) -> Pin | None:
        """Return what to call a host through; ``None`` for an address, and for a name that the settings have."""
        return Pin(host, self._allowed, self._recently) if self._allowed.follows(host) else None

    async def aclose(self) -> None:
        """End what is still looked up: nobody is told. Later calls look up again."""
        await self._recently.aclose()


class Pin:
    """A name, and the address that calls go to as long as it has it. For one transport, which serves no other name."""

    def __init__(self, host: str, allowed: Allowed, resolve: Resolve) -> None:
        """Made by `Pins.of`."""
        self._host = host
        self._allowed = allowed
        self._resolve = resolve
        self._address: str | None = None
        self._among = 1
        self._last: tuple[httpx2.URL, str, httpx2.URL] | None = None

    async def exchange(
        self, transport: httpx2.AsyncHTTPTransport, request: httpx2.Request, limit: int
    ) -> EndpointReply:
        """Send a request, and return the whole answer, as `taskqueue_dispatch.endpoint_client.exchange.exchange` does.

        The name is looked up for each connection that is made, though hardly more than once in ten seconds, and every
        address of it has to be allowed. It stays in ``Host``, and it is what a certificate is verified for. Raises
        `ElsewhereError` besides, and nothing was connected to then.
        """
        request.extensions["sni_hostname"] = self._host
        url, known = request.url, self._address
        refused: NotConnectedError | None = None
        if known is not None:
            try:
                return await self._to(known, url, transport, request, limit)
            except NotConnectedError as error:
                refused = error  # it has others, or another by now
        for address in (await self._allowed_addresses())[:_ADDRESSES]:
            if address != known:
                try:
                    return await self._to(address, url, transport, request, limit)
                except NotConnectedError as error:
                    refused = error
        raise refused or NotReachedError("its host name cannot be resolved")

    async def _to(
        self,
        address: str,
        url: httpx2.URL,
        transport: httpx2.AsyncHTTPTransport,
        request: httpx2.Request,
        limit: int,
    ) -> EndpointReply:
        async def check() -> None:
            # A connection that was kept is of an address that was good: it is a new one that is checked.
            if address not in await self._allowed_addresses():
                raise NotConnectedError("its host name now resolves to another address")

        self._address = address
        request.url = self._at(address, url)
        try:
            return await exchange(transport, request, limit, among=self._among, opening=check)
        except NotReachedError:
            if self._address == address:
                self._address = None
            raise

    def _at(self, address: str, url: httpx2.URL) -> httpx2.URL:
        # Jobs of an endpoint go to one URL: it is changed once, not for each of them.
        if self._last is None or self._last[0] is not url or self._last[1] != address:
            self._last = url, address, url.copy_with(host=address)
        return self._last[2]

    async def _allowed_addresses(self) -> tuple[str, ...]:
        """Return where the name leads now, if that is allowed."""
        try:
            async with asyncio.timeout(_SECONDS):
                matches = await self._resolve(self._host, _PORT)
        except (NotReached, TimeoutError):
            raise NotReachedError("its host name cannot be resolved") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NotReachedError("its name is not looked up any more") from None
        # One bad address spoils all: whoever mixes it in hopes for the next connection.
        if not self._allowed.holds(matches):
            raise ElsewhereError("its host name resolves to an address that is not allowed")
        self._among = max(1, min(len(matches), _ADDRESSES))
        return matches
