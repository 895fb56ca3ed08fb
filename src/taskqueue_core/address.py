"""Where the server's socket is."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from taskqueue_core.errors import ConfigurationError
from taskqueue_core.server_address import _is_loopback

__all__ = ["SOCKET_PATH", "Address"]

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
