"""Checks of the ``Host`` and ``Origin`` headers against DNS rebinding and cross-site requests."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.datastructures import Headers

from taskqueue_core.config import Settings
from taskqueue_server.problems import ProblemError

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LOOPBACK = re.compile(
    rf"(?:localhost|127(?:\.{_OCTET}){{3}}|\[::1\])(?::[0-9]{{1,5}})?", re.IGNORECASE
)
_PORT = re.compile(r":[0-9]{1,5}\Z")


def host_problem(headers: Headers, allowed: Collection[str], *, loopback: bool) -> str | None:
    """Return why the ``Host`` header is not allowed, or ``None`` if it is.

    With ``loopback``, the header must be a loopback name, which protects against DNS rebinding. Otherwise it must be
    one of the ``allowed`` names, with or without a port; an empty ``allowed`` permits every name.
    """
    hosts = headers.getlist("host")
    host = hosts[0].lower() if len(hosts) == 1 else ""
    if loopback:
        fine = _LOOPBACK.fullmatch(host) is not None
        return None if fine else "the Host header must be a loopback name, such as localhost"
    if not host or (allowed and not {host, _PORT.sub("", host)} & set(allowed)):
        return (
            "the Host header is missing, repeated or not in TASKQUEUE_ALLOWED_HOSTS of this server"
        )
    return None


def refusal(
    headers: Headers, scheme: str, settings: Settings, *, loopback: bool
) -> ProblemError | None:
    """Return the problem if the ``Host`` or ``Origin`` header of a request is not allowed, otherwise ``None``.

    Allowed origins are those in the settings and the server's own. A request without ``Origin`` is allowed.
    """
    if wrong := host_problem(headers, settings.allowed_hosts, loopback=loopback):
        return ProblemError(421, "wrong_host", wrong)
    origins = headers.getlist("origin")
    if not origins:
        return None
    if len(origins) == 1 and origins[0] in (*settings.origins, _target(headers, scheme)):
        return None
    return ProblemError(
        403, "origin", "cross-site request rejected: its Origin header is not in TASKQUEUE_ORIGINS"
    )


def is_own_origin(headers: Headers, scheme: str, listed: Collection[str]) -> bool:
    """Return whether the ``Origin`` header names this server.

    Behind a proxy that terminates TLS, the origin must be in ``listed``, and its host must equal the ``Host`` header.
    """
    origins = headers.getlist("origin")
    if len(origins) != 1:
        return False
    [origin] = origins
    secure = _target(headers, "https")
    return origin == _target(headers, scheme) or (origin == secure and origin in listed)


def _target(headers: Headers, scheme: str) -> str:
    return f"{scheme}://{headers.get('host', '')}"
