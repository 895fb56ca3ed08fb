"""Where endpoints may be: in the networks and at the hosts that the settings name, and nowhere else."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import urlsplit

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of
from taskqueue_dispatch.outbound_http.dns import look_up
from taskqueue_dispatch.outbound_http.errors import NotReached

Resolve = Callable[[str], Awaitable[tuple[str, ...]]]
"""gives the addresses of a host, none where there are none"""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_PLAIN = re.compile(r"[!-~]+")
_ODD = set('\\"<>^`{|}')
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_ANY = "*."
_PLACES = "the networks and hosts of TASKQUEUE_DISPATCH_ENDPOINTS_ALLOWED, a setting of the server"
_RESOLVING = 5.0


async def resolve(host: str) -> tuple[str, ...]:
    """Ask the system's resolver."""
    try:
        async with asyncio.timeout(_RESOLVING):
            return await look_up(host, 0, threads="look-up-endpoints")
    except (NotReached, TimeoutError):
        return ()


class Allowed:
    """The networks and hosts of ``TASKQUEUE_DISPATCH_ENDPOINTS_ALLOWED``."""

    def __init__(self, entries: Iterable[str], resolve: Resolve = resolve) -> None:
        """What is no network is a host: ``gpu.example.com``, or ``*.example.com`` for all below it."""
        self._networks: list[_Network] = []
        self._hosts: list[str] = []
        self._resolve = resolve
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry.strip(), strict=False))
            except ValueError:
                self._hosts.append(entry.strip().lower().rstrip("."))

    async def check(self, url: object) -> None:
        """Check an endpoint's URL. Raises `InvalidInput`, and shows nothing of it."""
        host = _host_of(url)
        address = _address_of(host)
        if address is not None:
            if self._holds(address):
                return
            raise InvalidInput("endpoint", "an address that is not allowed", _PLACES)
        if self._names(host):
            return
        matches = await self._resolve(host)
        if not matches:
            raise InvalidInput(
                "endpoint",
                "a host name that cannot be resolved",
                "a name that can be resolved, or an IP address",
            )
        if not self.holds(matches):
            raise InvalidInput("endpoint", "a host that is not allowed", _PLACES)

    def follows(self, host: str) -> bool:
        """Whether it matters where a host's name leads: it is no address, and no name that the settings have."""
        host = host.lower().rstrip(".")
        return _address_of(host) is None and not self._names(host)

    def holds(self, addresses: Iterable[str]) -> bool:
        """Whether every address is within the networks."""
        matches = [_address_of(address) for address in addresses]
        return all(item is not None and self._holds(item) for item in matches)

    def _names(self, host: str) -> bool:
        return any(_matches(host, pattern) for pattern in self._hosts)

    def _holds(self, address: _Address) -> bool:
        return any(address in network for network in self._networks)


def _host_of(url: object) -> str:
    if not isinstance(url, str) or not 0 < len(url) <= LIMITS.url:
        raise InvalidInput("endpoint", kind_of(url), f"a URL of at most {LIMITS.url} characters")
    if not _PLAIN.fullmatch(url) or _ODD & set(url):
        raise InvalidInput(
            "endpoint", "a URL with spaces or invalid characters", "http:// or https:// and a host"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or not host or port == 0:
        raise InvalidInput("endpoint", "an invalid URL", "http:// or https:// and a host")
    if "@" in parts.netloc:
        raise InvalidInput("endpoint", "a URL with a user or password", "one without")
    if "#" in url:
        raise InvalidInput("endpoint", "a URL with a fragment", "one without")
    if "%" in host or (":" not in host and not _is_name(host)):
        raise InvalidInput("endpoint", "an invalid host name", "a name, or an address")
    return host.rstrip(".")


def _is_name(host: str) -> bool:
    """Whether it is a host's name or a plain IPv4 address: other numbers mean another address to some programs."""
    name = host.removesuffix(".")
    if _NUMBER.fullmatch(name.rpartition(".")[2]):
        return _address_of(name) is not None
    return _NAME.fullmatch(name) is not None


def _address_of(host: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith(_ANY):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return host == pattern
