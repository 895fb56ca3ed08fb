"""Strict parsing of URLs, so that the check of a URL and the HTTP client read it in the same way."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, kind_of
from taskqueue_dispatch.outbound_http.addresses import Address

_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"
    r"(?P<host>\[[0-9A-Fa-f:.]*\]|[A-Za-z0-9._-]*)"
    r"(?::(?P<port>[0-9]+))?"
    r"(?P<target>(?:/[A-Za-z0-9._~!$&'()*+,;=:@/%-]*)?(?:\?[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]-]*)?)",
    re.ASCII,
)
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_HOST = 253
_PORTS = {"https": 443, "http": 80}
_HIGHEST = 65_535
_FORM = (
    "https://host[:port][/path][?query] in ASCII (an international name as xn--…), "
    "without user, password or fragment"
)
_NAME = "a host name without a dot at its end, or a complete IP address such as 192.0.2.1 or [2001:db8::1]"


class UrlParts(msgspec.Struct, frozen=True):
    """The parts of a URL whose form was checked."""

    scheme: str
    host: str
    """host name in lower case, or IP address in its usual form without brackets"""
    port: int
    target: str
    """path and query, unchanged"""
    address: Address | None
    """the host as an address, if it is an IP address"""

    def __repr__(self) -> str:
        """Return a text without path and query, which may contain secrets."""
        return f"UrlParts({self.scheme}://{self.authority})"

    @property
    def authority(self) -> str:
        """Value of the ``Host`` header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == _PORTS[self.scheme] else f"{name}:{self.port}"


def read_url(field: str, url: object) -> UrlParts:
    """Parse a URL ``http[s]://host[:port][/path][?query]``. Raises `InvalidInput` for ``field`` if it is invalid."""
    if not isinstance(url, str) or len(url) > LIMITS.url:
        raise InvalidInput(field, kind_of(url), f"a URL of at most {LIMITS.url} characters")
    match = _URL.fullmatch(url)
    if match is None:
        raise InvalidInput(field, f"{kind_of(url)} that is not a valid URL", _FORM)
    scheme = match["scheme"].lower()
    if scheme not in _PORTS:
        raise InvalidInput(field, "a URL with a scheme that is not supported", _FORM)
    port = _PORTS[scheme] if match["port"] is None else _port(match["port"])
    if port is None:
        raise InvalidInput(field, "a URL with an invalid port", f"a port from 1 to {_HIGHEST}")
    host, address = _host(field, match["host"].lower())
    return UrlParts(scheme, host, port, match["target"] or "/", address)


def _port(digits: str) -> int | None:
    if digits.startswith("0") or len(digits) > len(str(_HIGHEST)):
        return None
    return int(digits) if int(digits) <= _HIGHEST else None


def _host(field: str, host: str) -> tuple[str, Address | None]:
    try:
        if host.startswith("["):
            six = IPv6Address(host[1:-1])
            return str(six), six
        labels = host.split(".")
        # Most parsers read any host that ends with a number as an IPv4 address. Accept only the usual form of such
        # addresses.
        if _NUMBER.fullmatch(labels[-1]):
            four = IPv4Address(host)
            return str(four), four
    except ValueError:
        raise InvalidInput(field, "a URL with an invalid host", _NAME) from None
    if len(host) > _HOST or not all(map(_LABEL.fullmatch, labels)):
        raise InvalidInput(field, "a URL with an invalid host", _NAME)
    return host, None
