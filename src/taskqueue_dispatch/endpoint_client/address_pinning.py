"""Connections to endpoints by host name. For each connection, the name is resolved and its addresses are checked."""

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
from taskqueue_dispatch.outbound_http.dns import NotReached, Resolve, look_up

_LOOKUP_SECONDS = 5.0
FAILURE_SECONDS = 0.5
"""seconds for which a failed lookup is cached; less than the default ``health_interval``"""
_MAX_ADDRESSES = 3
"""maximum number of addresses of a host name that are tried until a connection succeeds"""
_PORT = 0
"""port for lookups; addresses do not depend on it, so one lookup serves all ports of a host"""

ask_the_system: Resolve = partial(look_up, threads="look-up-endpoints")
"""Resolver with its own threads, so that slow lookups of callback hosts do not delay those of endpoints."""


class AddressNotAllowedError(NotReachedError):
    """The error if the server's host name resolves to an address that is not allowed."""


class AddressPin:
    """The checked address to which requests for a host name are sent, as long as the name resolves to it."""

    def __init__(self, host: str, policy: EndpointPolicy, resolve: Resolve) -> None:
        self._host = host
        self._policy = policy
        self._resolve = resolve
        self._address: str | None = None
        self._among = 1
        self._last: tuple[httpx2.URL, str, httpx2.URL] | None = None

    async def exchange(
        self, transport: httpx2.AsyncHTTPTransport, request: httpx2.Request, limit: int
    ) -> EndpointReply:
        """Send a request to an allowed address of the host, and return the complete response.

        For each new connection, the name is resolved, with a cache of about ten seconds. All its addresses must be
        allowed. The ``Host`` header and the verification of the certificate use the name. Raises
        `AddressNotAllowedError` before any connection is made, and the errors of
        `taskqueue_dispatch.endpoint_client.exchange.exchange`.
        """
        request.extensions["sni_hostname"] = self._host
        url, known = request.url, self._address
        refused: NotConnectedError | None = None
        if known is not None:
            try:
                return await self._to(known, url, transport, request, limit)
            except NotConnectedError as error:
                # Next, try the addresses to which the name resolves now.
                refused = error
        for address in (await self._allowed_addresses())[:_MAX_ADDRESSES]:
            if address != known:
                try:
                    return await self._to(address, url, transport, request, limit)
                except NotConnectedError as error:
                    refused = error
        raise refused or NotReachedError("the server's host name cannot be resolved")

    async def _to(
        self,
        address: str,
        url: httpx2.URL,
        transport: httpx2.AsyncHTTPTransport,
        request: httpx2.Request,
        limit: int,
    ) -> EndpointReply:
        async def check() -> None:
            # Check only new connections: the address of an open connection was allowed when it was made.
            if address not in await self._allowed_addresses():
                raise NotConnectedError("the server's host name now resolves to another address")

        self._address = address
        request.url = self._at(address, url)
        try:
            return await exchange(transport, request, limit, among=self._among, opening=check)
        except NotReachedError:
            if self._address == address:
                self._address = None
            raise

    def _at(self, address: str, url: httpx2.URL) -> httpx2.URL:
        # Cache the URL with the address, because all jobs of an endpoint go to the same URL.
        if self._last is None or self._last[0] is not url or self._last[1] != address:
            self._last = url, address, url.copy_with(host=address)
        return self._last[2]

    async def _allowed_addresses(self) -> tuple[str, ...]:
        """Return the current addresses of the host. Raise `AddressNotAllowedError` if any of them is not allowed."""
        try:
            async with asyncio.timeout(_LOOKUP_SECONDS):
                matches = await self._resolve(self._host, _PORT)
        except (NotReached, TimeoutError):
            raise NotReachedError("the server's host name cannot be resolved") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise NotReachedError("the lookup of the server's host name was cancelled") from None
        # One forbidden address is enough to refuse the host, because a later connection might use that address.
        if not self._policy.contain(matches):
            raise AddressNotAllowedError(
                "the server's host name has an address that is not allowed"
            )
        self._among = max(1, min(len(matches), _MAX_ADDRESSES))
        return matches
