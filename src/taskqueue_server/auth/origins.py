"""Which names a server answers to, and which pages may speak to it: none of another site, unless it is listed."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LOOPBACK = re.compile(
    rf"(?:localhost|127(?:\.{_OCTET}){{3}}|\[::1\])(?::[0-9]{{1,5}})?", re.IGNORECASE
)
_PORT = re.compile(r":[0-9]{1,5}\Z")


def host_problem(headers: Headers, allowed: Collection[str], *, loopback: bool) -> str | None:
    """Say what is wrong with the ``Host`` header; ``None`` if nothing is.

    With ``loopback`` it must name this machine: a page whose name was rebound to it has another. Else it must be
    ``allowed``, with its port or without; where nothing is listed every name is.
    """
    hosts = headers.getlist("host")
    host = hosts[0].lower() if len(hosts) == 1 else ""
    if loopback:
        fine = _LOOPBACK.fullmatch(host) is not None
        return None if fine else "the Host header must be a loopback name"
    if not host or (allowed and not {host, _PORT.sub("", host)} & set(allowed)):
        return "the Host header is not a name of this server"
    return None


def is_allowed_origin(headers: Headers, scheme: str, listed: Collection[str]) -> bool:
    """Whether there is no ``Origin`` header, or one that is on the list or where the request went."""
    origins = headers.getlist("origin")
    if not origins:
        return True
    return len(origins) == 1 and (origins[0] in listed or origins[0] == _target(headers, scheme))


def is_own_origin(headers: Headers, scheme: str, listed: Collection[str]) -> bool:
    """Whether there is an ``Origin`` header, and it is this server's: where the request went.

    Behind a proxy that ends TLS it is the one on the list that has the name of the ``Host`` header.
    """
    origins = headers.getlist("origin")
    if len(origins) != 1:
        return False
    [origin] = origins
    secure = _target(headers, "https")
    return origin == _target(headers, scheme) or (origin == secure and origin in listed)


def _target(headers: Headers, scheme: str) -> str:
    return f"{scheme}://{headers.get('host', '')}"
