"""The check that the URL of an endpoint belongs to an allowed network or host."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import urlsplit

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of
from taskqueue_dispatch.outbound_http.dns import NotReached, look_up

Resolve = Callable[[str], Awaitable[tuple[str, ...]]]
"""Function that returns the addresses of a host name, or an empty tuple if the name cannot be resolved."""
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_PLAIN = re.compile(r"[!-~]+")
_ODD = set('\\"<>^`{|}')
_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_EXPECTED = (
    "the networks and hosts in TASKQUEUE_DISPATCH_ENDPOINTS_ALLOWED, a setting of the server"
)
_RESOLVE_SECONDS = 5.0


async def resolve(host: str) -> tuple[str, ...]:
    """Return the addresses of a host name from the system's resolver, or an empty tuple if the lookup fails."""
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            return await look_up(host, 0, threads="look-up-endpoints")
    except (NotReached, TimeoutError):
        return ()


class EndpointPolicy:
    """The networks and hosts that ``TASKQUEUE_DISPATCH_ENDPOINTS_ALLOWED`` allows for endpoints."""

    def __init__(self, entries: Iterable[str], resolve: Resolve = resolve) -> None:
        """Create a policy. Entries are networks, hosts (``gpu.example.com``) or wildcards (``*.example.com``)."""
        self._networks: list[_Network] = []
        self._hosts: list[str] = []
        self._resolve = resolve
        for entry in entries:
            try:
                self._networks.append(ipaddress.ip_network(entry.strip(), strict=False))
            except ValueError:
                self._hosts.append(entry.strip().lower().rstrip("."))

    async def check(self, url: object) -> None:
        """Check the URL of an endpoint.

        Raises `InvalidInput` if the URL is not allowed; the error does not contain the URL.
        """
        host = _host_of(url)
        address = _address_of(host)
        if address is not None:
            if self._contains(address):
                return
            raise InvalidInput("endpoint", "an address that is not allowed", _EXPECTED)
        if self._is_listed(host):
            return
        matches = await self._resolve(host)
        if not matches:
            raise InvalidInput(
                "endpoint",
                "a host name that cannot be resolved",
                "a name that can be resolved, or an IP address",
            )
        if not self.contain(matches):
            raise InvalidInput("endpoint", "a host that is not allowed", _EXPECTED)

    def must_resolve(self, host: str) -> bool:
        """Return whether a host's addresses must be checked: it is neither an allowed address nor listed by name."""
        host = host.lower().rstrip(".")
        return not (self.contain([host]) or self._is_listed(host))

    def contain(self, addresses: Iterable[str]) -> bool:
        """Return whether all addresses are within the allowed networks."""
        matches = [_address_of(address) for address in addresses]
        return all(item is not None and self._contains(item) for item in matches)

    def _is_listed(self, host: str) -> bool:
        return any(
            host == listed
            or (listed.startswith("*.") and len(host) >= len(listed) and host.endswith(listed[1:]))
            for listed in self._hosts
        )

    def _contains(self, address: _Address) -> bool:
        return any(address in network for network in self._networks)


def _host_of(url: object) -> str:
    if not isinstance(url, str) or not 0 < len(url) <= LIMITS.url:
        raise InvalidInput("endpoint", kind_of(url), f"a URL of 1 to {LIMITS.url} characters")
    if not _PLAIN.fullmatch(url) or _ODD & set(url):
        raise InvalidInput(
            "endpoint",
            "a URL with invalid characters",
            'printable ASCII without spaces or any of \\"<>^`{|}',
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme not in {"http", "https"} or not host or port == 0:
        raise InvalidInput(
            "endpoint", "an invalid URL", "an http(s):// URL with a host; port: 1 to 65535"
        )
    if "@" in parts.netloc:
        raise InvalidInput("endpoint", "a URL with a user or password", "a URL without them")
    if "#" in url:
        raise InvalidInput("endpoint", "a URL with a fragment", "a URL without a fragment")
    if "%" in host or (":" not in host and not _is_name(host)):
        raise InvalidInput("endpoint", "an invalid host name", "a host name or an IP address")
    return host.rstrip(".")


def _is_name(host: str) -> bool:
    """Return whether ``host`` is a host name or an IPv4 address in its usual form; other numeric forms are rejected."""
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
