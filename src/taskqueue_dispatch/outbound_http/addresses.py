"""The rules that decide whether requests to clients' URLs may go to an IP address: it must be public or allowed."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NEVER: tuple[Network, ...] = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",  # "this host": some systems treat it as their own address
            "224.0.0.0/4",  # multicast
            "255.255.255.255/32",  # broadcast
            "::/128",
            "ff00::/8",
        ),
    )
)
"""networks that are never allowed, whatever an operator configures"""

_SPECIAL: tuple[Network, ...] = tuple(
    map(
        ip_network,
        (
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # carrier-grade NAT; some clouds use it for their services
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # Azure's platform service, on a public address
            "169.254.0.0/16",  # link-local, with the metadata services of clouds
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments, and a cloud's metadata service
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "240.0.0.0/4",  # reserved
            "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation
        ),
    )
)
_UNICAST = IPv6Network("2000::/3")
"""network of all public IPv6 addresses; it has no loopback, mapped, NAT64, ULA, link-local or site-local addresses"""
_HOLDERS = tuple(map(IPv6Network, ("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")))
"""networks whose addresses end with an IPv4 address: IPv4-compatible, IPv4-mapped, NAT64"""
_OWN = (IPv6Address("::"), IPv6Address("::1"))
_LOW = 0xFFFF_FFFF
_ISATAP, _ISATAP_MASK = 0x0000_5EFE, 0xFCFF_FFFF


def may_be_reached(address: Address, exceptions: Iterable[Network] = ()) -> bool:
    """Return whether an address is public, or in one of the networks that an operator allows (``exceptions``).

    Multicast, broadcast and unspecified addresses are never allowed. An IPv6 address that contains an IPv4 address, for
    example with NAT64, is allowed only if both addresses are.
    """
    exceptions = tuple(exceptions)
    if _in(address, _NEVER):
        return False
    inner = _inner(address)
    if inner is not None and not may_be_reached(inner, exceptions):
        return False
    return _in(address, exceptions) or _public(address)


def _public(address: Address) -> bool:
    if isinstance(address, IPv6Address) and (address not in _UNICAST or address.scope_id):
        return False
    return not _in(address, _SPECIAL)


def _in(address: Address, networks: Iterable[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _inner(address: Address) -> Address | None:
    if isinstance(address, IPv4Address) or address in _OWN:
        return None
    isatap = (int(address) >> 32) & _ISATAP_MASK == _ISATAP
    if isatap or _in(address, _HOLDERS):
        return IPv4Address(int(address) & _LOW)
    return address.sixtofour or (address.teredo[1] if address.teredo else None)
