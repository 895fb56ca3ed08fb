"""Who may speak to a server on loopback: no page of another site, not even by a name that it made to point here."""

from __future__ import annotations

import re

from starlette.datastructures import Headers

__all__ = ["is_loopback_host", "is_same_origin"]

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LOOPBACK = re.compile(
    rf"(?:localhost|127(?:\.{_OCTET}){{3}}|\[::1\])(?::[0-9]{{1,5}})?", re.IGNORECASE
)


def is_loopback_host(headers: Headers) -> bool:
    """Whether the one ``Host`` header names this machine. A page whose name was rebound to it has another."""
    hosts = headers.getlist("host")
    return len(hosts) == 1 and _LOOPBACK.fullmatch(hosts[0]) is not None


def is_same_origin(headers: Headers, scheme: str) -> bool:
    """Whether there is no ``Origin`` header, or one that equals where the request went."""
    origins = headers.getlist("origin")
    return not origins or origins == [f"{scheme}://{headers.get('host', '')}"]
