"""Where the server is."""

from __future__ import annotations

import ipaddress
from typing import Self
from urllib.parse import quote, urlsplit

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.limits import check_name

_FORM = "the server's address must look like http://host:port or https://host/prefix"
_SCHEMES = {"http": "http", "https": "https", "ws": "http", "wss": "https"}


class ServerAddress(msgspec.Struct, frozen=True):
    """A server's address, as used and as shown."""

    base: str
    shown: str
    """for errors: without credentials"""
    loopback: bool
    tls: bool

    def __repr__(self) -> str:
        """Show no credentials."""
        return f"ServerAddress({self.shown!r})"

    @classmethod
    def of(cls, url: str) -> Self:
        """Read ``http[s]://host[:port][/prefix]`` (``ws[s]`` will do). Raises `ConfigurationError`."""
        try:
            parts = urlsplit(url)
            scheme, host, port = _SCHEMES.get(parts.scheme), parts.hostname, parts.port
        except ValueError:
            raise ConfigurationError(_FORM) from None
        if scheme is None or not host or parts.query or parts.fragment:
            raise ConfigurationError(_FORM)
        name = f"[{host}]" if ":" in host else host
        shown = f"{scheme}://{name}" + (f":{port}" if port else "") + parts.path.rstrip("/")
        base = f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        return cls(base, shown, _is_loopback(host), scheme == "https")


def path(collection: str, key: str, *rest: str) -> str:
    """Return a path under ``/v1``. Raises `InvalidInput` for a key or id that cannot be one."""
    check_name("key", key)
    for part in rest:
        check_name("id", part)
    return "/".join(("/v1", collection, *(quote(part, safe="") for part in (key, *rest))))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


SOCKET_PATH = "/v1/socket"
_SOCKET_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class Address(msgspec.Struct, frozen=True):
    """A server's address, as given and as a socket's."""

    uri: str
    shown: str
    """for logs and errors: without credentials"""
    loopback: bool
    credentials: bool = False
    """whether it has a user and a password, which go where a token would"""

    def __repr__(self) -> str:
        """Show no credentials."""
        return f"Address({self.shown!r})"

    @classmethod
    def of(cls, url: str) -> Address:
        """Read ``http[s]://host[:port][/prefix]`` (``ws[s]`` will do). Raises `ConfigurationError`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _bad() from None
        scheme = _SOCKET_SCHEMES.get(parts.scheme)
        if scheme is None or not host or parts.query or parts.fragment:
            raise _bad()
        name = f"[{host}]" if ":" in host else host
        shown = f"{parts.scheme}://{name}" + (f":{port}" if port else "")
        prefix = parts.path.rstrip("/").removesuffix(SOCKET_PATH)
        uri = f"{scheme}://{parts.netloc}{prefix}{SOCKET_PATH}"
        return cls(uri, shown + prefix, _is_loopback(host), "@" in parts.netloc)


def _bad() -> ConfigurationError:
    return ConfigurationError(
        "the server's address must look like http://host:port or https://host/prefix"
    )
