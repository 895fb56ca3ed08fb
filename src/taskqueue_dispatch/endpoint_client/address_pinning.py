"""Host names of endpoints: their addresses are resolved and checked for each connection."""

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
from taskqueue_dispatch.endpoint_policy import EndpointPolicy
from taskqueue_dispatch.outbound_http.dns import CachedLookup, Resolve, look_up
from taskqueue_dispatch.outbound_http.errors import NotReached

_LOOKUP_SECONDS = 5.0
_FAILURE_SECONDS = 0.5
"""seconds for which a failed look-up is cached; less than the time between two health checks of a server"""
_MAX_ADDRESSES = 3
"""addresses of a name that are tried, if no connection is possible"""
_PORT = 0
"""the addresses of a name do not depend on the port, so one look-up serves all ports"""

ask_the_system: Resolve = partial(look_up, threads="look-up-endpoints")
"""uses threads of its own, so that slow look-ups of callback hosts do not delay those of endpoints"""


class AddressNotAllowedError(NotReachedError):
    """The server's host name resolves to an address that is not allowed."""


class AddressPins:
    """Creates a pin for each host name that must be resolved and checked. For one event loop."""

    def __init__(self, policy: EndpointPolicy, resolve: Resolve) -> None:
        """Create it without any I/O."""
        self._policy = policy
        self._cached = CachedLookup(resolve, failures=_FAILURE_SECONDS)

    def of(self, host: str) -> AddressPin | None:
        """Return the pin of a host, or ``None`` if it is an address or a listed host."""
        return (
            AddressPin(host, self._policy, self._cached)
            if self._policy.must_resolve(host)
            else None
        )

    async def aclose(self) -> None:
        """Cancel pending look-ups. Later calls resolve again."""
        await self._cached.aclose()


class AddressPin:
    """A host name and the address that requests use while the name has it. Belongs to the transport of one origin."""

    def __init__(self, host: str, policy: EndpointPolicy, resolve: Resolve) -> None:
        """Create a pin; called by `AddressPins.of`."""
        self._host = host
        self._policy = policy
        self._resolve = resolve
        self._address: str | None = None
        self._among = 1
        self._last: tuple[httpx2.URL, str, httpx2.URL] | None = None

    async def exchange(
        self, transport: httpx2.AsyncHTTPTransport, request: httpx2.Request, limit: int
    ) -> EndpointReply:
        """Send a request, and return the whole answer, as `taskqueue_dispatch.endpoint_client.exchange.exchange` does.

        The name is resolved for each new connection, from a cache of about ten seconds, and all its addresses must be
        allowed. The header ``Host`` and the verification of the certificate use the name. Also raises
        `AddressNotAllowedError`, before any connection.
        """
        request.extensions["sni_hostname"] = self._host
        url, known = request.url, self._address
        refused: NotConnectedError | None = None
        if known is not None:
            try:
                return await self._to(known, url, transport, request, limit)
            except NotConnectedError as error:
                refused = error  # try its other addresses, or a new one
        for address in (await self._allowed_addresses())[:_MAX_ADDRESSES]:
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
            # Only new connections are checked: the address of an open one was allowed when it was made.
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
        # All jobs of an endpoint go to one URL, so the changed URL is cached.
        if self._last is None or self._last[0] is not url or self._last[1] != address:
            self._last = url, address, url.copy_with(host=address)
        return self._last[2]

    async def _allowed_addresses(self) -> tuple[str, ...]:
        """Return the current addresses of the name. Raise `AddressNotAllowedError` if one of them is not allowed."""
        try:
            async with asyncio.timeout(_LOOKUP_SECONDS):
                matches = await self._resolve(self._host, _PORT)
        except (NotReached, TimeoutError):
            raise NotReachedError("its host name cannot be resolved") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NotReachedError("the look-up of its host name was cancelled") from None
        # One forbidden address is enough to refuse: a later connection might use it.
        if not self._policy.contain(matches):
            raise AddressNotAllowedError("its host name resolves to an address that is not allowed")
        self._among = max(1, min(len(matches), _MAX_ADDRESSES))
        return matches
