"""The address of a server, and the paths of its HTTP API."""

from __future__ import annotations

import ipaddress
from typing import Self
from urllib.parse import quote, urlsplit

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.limits import check_name

SOCKET_PATH = "/v1/socket"
_TLS_SUFFIXES = {"http": "", "ws": "", "https": "s", "wss": "s"}
_ALLOWED = (
    "it must look like http://host:port or https://host/prefix; "
    "set it with TASKQUEUE_SERVER_URL, --server or --url"
)
_STORES = ("redis", "rediss", "unix")


class ServerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a server, for HTTP requests and for the socket."""

    http_base: str
    socket_uri: str
    shown: str
    """the address without credentials, for logs and errors"""
    loopback: bool
    tls: bool
    has_credentials: bool
    """whether the address contains a user name or password; the header ``Authorization`` has these, not the token"""

    def __repr__(self) -> str:
        return f"ServerAddress({self.shown!r})"

    @classmethod
    def of(cls, url: str) -> Self:
        """Parse a URL ``http[s]://host[:port][/prefix]``; ``ws[s]`` is allowed, too. Raises `ConfigurationError`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ConfigurationError(f"invalid server URL: {_ALLOWED}") from None
        if parts.scheme in _STORES:
            raise ConfigurationError(
                f"invalid server URL: {parts.scheme}:// is the address of a store, not of a server: set "
                "TASKQUEUE_BACKEND=redis and TASKQUEUE_REDIS_URL"
            )
        if "//" not in url and url:
            raise ConfigurationError(f"invalid server URL: http:// is missing: {_ALLOWED}")
        if parts.scheme not in _TLS_SUFFIXES or not host or parts.query or parts.fragment:
            raise ConfigurationError(f"invalid server URL: {_ALLOWED}")
        tls = _TLS_SUFFIXES[parts.scheme]
        prefix = parts.path.rstrip("/").removesuffix(SOCKET_PATH)
        name = f"[{host}]" if ":" in host else host
        return cls(
            http_base=f"http{tls}://{parts.netloc}{prefix}",
            socket_uri=f"ws{tls}://{parts.netloc}{prefix}{SOCKET_PATH}",
            shown=f"{parts.scheme}://{name}" + (f":{port}" if port else "") + prefix,
            loopback=_is_loopback(host),
            tls=bool(tls),
            has_credentials="@" in parts.netloc,
        )


def path(collection: str, key: str, *rest: str) -> str:
    """Return the path of a resource under ``/v1``, quoted for a URL. Raises `InvalidInput` for an invalid key or id."""
    check_name("key", key)
    for part in rest:
        check_name("id", part)
    return "/".join(("/v1", collection, *(quote(part, safe="") for part in (key, *rest))))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
