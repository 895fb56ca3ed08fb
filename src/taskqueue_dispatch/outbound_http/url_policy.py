"""Whether a URL may be called: its form, its scheme, its port, and each address that its host has."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.outbound_http.addresses import Network, may_be_reached
from taskqueue_dispatch.outbound_http.dns import Resolve, look_up
from taskqueue_dispatch.outbound_http.errors import NameUnknown, NotReached
from taskqueue_dispatch.outbound_http.urls import UrlParts, read_url

_SECONDS = 5.0
"""for a look-up"""
_HTTP = 80


class UrlPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What may be called. Nothing but public addresses, unless `networks` has others."""

    ports: frozenset[int] = frozenset({443, 8443})
    http: bool = False
    """plain http too, at these ports and 80"""
    networks: tuple[Network, ...] = ()
    """where private addresses are allowed"""


class Checked(msgspec.Struct, frozen=True):
    """A URL that may be called now, at these addresses and no others."""

    parts: UrlParts
    addresses: tuple[str, ...]
    """in the order of preference"""


async def check_url(
    url: str, policy: UrlPolicy, *, field: str = "url", resolve: Resolve = look_up
) -> Checked:
    """Look the host up, once, and check every answer.

    Raises `InvalidInput`, naming ``field``, for what may not be called, `NotReached` where the name can't be looked
    up now, and `NameUnknown` where there is none. None of them shows the URL.
    """
    parts = read_url(field, url)
    _check_way(parts, policy, field)
    if parts.address is not None:
        matches: tuple[str, ...] = (str(parts.address),)
    else:
        try:
            async with asyncio.timeout(_SECONDS):
                matches = await resolve(parts.host, parts.port)
        except TimeoutError:
            raise NotReached("the host name was not resolved in time") from None
    if not matches:
        raise NameUnknown("the host name does not exist")
    # One bad answer spoils all: whoever mixes them in hopes that the next connection goes there.
    if not all(_allowed(address, policy) for address in matches):
        raise InvalidInput(
            field,
            "a host with an address that is not public",
            "hosts with public addresses only, or in networks that the operator allows",
        )
    return Checked(parts, matches)


def _check_way(parts: UrlParts, policy: UrlPolicy, field: str) -> None:
    if parts.scheme == "http" and not policy.http:
        raise InvalidInput(field, "a URL of plain http", "https://…")
    ports = policy.ports | ({_HTTP} if parts.scheme == "http" else set())
    if parts.port not in ports:
        raise InvalidInput(
            field, "a URL with another port", f"the ports {', '.join(map(str, sorted(ports)))}"
        )


def _allowed(address: str, policy: UrlPolicy) -> bool:
    try:
        return may_be_reached(ip_address(address), policy.networks)
    except ValueError:
        return False
