"""The check of whether a URL may be called: its form, scheme and port, and all addresses of its host."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.outbound_http.addresses import Network, may_be_reached
from taskqueue_dispatch.outbound_http.dns import NameUnknown, NotReached, Resolve, look_up
from taskqueue_dispatch.outbound_http.urls import UrlParts, read_url

_SECONDS = 5.0
"""time limit of a lookup in seconds"""
_HTTP = 80


class UrlPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules for URLs that may be called. Public addresses and those in ``networks`` are allowed."""

    ports: frozenset[int] = frozenset({443, 8443})
    http: bool = False
    """whether URLs with the scheme http are allowed too, on ``ports`` and on port 80"""
    networks: tuple[Network, ...] = ()
    """networks whose addresses are allowed although they are not public"""


class Checked(msgspec.Struct, frozen=True):
    """A checked URL, with the only addresses to which a request may connect."""

    parts: UrlParts
    addresses: tuple[str, ...]
    """addresses in order of preference"""


async def check_url(
    url: str, policy: UrlPolicy, *, field: str = "url", resolve: Resolve = look_up
) -> Checked:
    """Check whether a URL may be called. Resolve its host once and check every address.

    Raises `InvalidInput` with ``field`` as the name of the field if the URL is not allowed, `NotReached` if its host
    cannot be resolved now, and `NameUnknown` if the host does not exist. No error contains the URL.
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
    # Reject a host with any forbidden address, because an attacker could mix forbidden and allowed addresses.
    if not all(_allowed(address, policy) for address in matches):
        raise InvalidInput(
            field,
            "a host with an address that is not public",
            "hosts whose addresses are all public or in networks that the operator allows",
        )
    return Checked(parts, matches)


def _check_way(parts: UrlParts, policy: UrlPolicy, field: str) -> None:
    if parts.scheme == "http" and not policy.http:
        raise InvalidInput(field, "an unencrypted http:// URL", "an https:// URL")
    ports = policy.ports | ({_HTTP} if parts.scheme == "http" else set())
    if parts.port not in ports:
        raise InvalidInput(
            field,
            "a URL with a port that is not allowed",
            f"the ports {', '.join(map(str, sorted(ports)))}",
        )


def _allowed(address: str, policy: UrlPolicy) -> bool:
    try:
        return may_be_reached(ip_address(address), policy.networks)
    except ValueError:
        return False
