"""What a request shows of who makes it: a bearer token in its header, or in the cookie of a browser's session."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection

from starlette.requests import HTTPConnection

from taskqueue_server.auth.origins import is_own_origin

_COOKIE = "taskqueue-session"
_SECURE = f"__Host-{_COOKIE}"
"""browsers keep this name to cookies that came over TLS, from this very host, for all its paths"""
_TOKEN = 4096
"""characters of a token at the most"""


def token_of(connection: HTTPConnection) -> str | None:
    """Return the bearer token of the ``Authorization`` header, else of a page's session; ``None`` where neither is.

    A socket shows no session: browsers send cookies along from any page.
    """
    shown = connection.headers.getlist("authorization")
    if not shown:
        return _token_of_session(connection) if connection.scope["type"] == "http" else None
    scheme, _, token = shown[0].partition(" ")
    return token.strip() if len(shown) == 1 and scheme.lower() == "bearer" else None


def shows_header(connection: HTTPConnection) -> bool:
    """Whether it tries to show a token by header, a good one or not."""
    return "authorization" in connection.headers


def by_cookie(connection: HTTPConnection) -> bool:
    """Whether a session is all that it shows: then another site's page may be behind it."""
    return not shows_header(connection) and _session_of(connection) is not None


def peer_of(connection: HTTPConnection) -> str:
    """Return the address it came from, as far as it is known."""
    return connection.client.host if connection.client else ""


def login_cookie(connection: HTTPConnection, token: str, origins: Collection[str]) -> str:
    """Return the ``Set-Cookie`` that begins a session. It is not checked here whether the token is any good.

    ``origins`` are those of the settings (as the server's own, unless given): behind a proxy that ends TLS they tell
    that browsers come by https.
    """
    scheme, origin = connection.url.scheme, connection.headers.get("origin", "")
    secure = scheme == "https" or (
        origin.startswith("https:") and is_own_origin(connection.headers, scheme, origins)
    )
    return session_cookie(token, secure=secure)


def logout_cookie(connection: HTTPConnection) -> str:
    """Return the ``Set-Cookie`` that ends the session that the request shows."""
    secure = connection.url.scheme == "https" or _SECURE in connection.cookies
    return _cookie("", "; Max-Age=0", secure=secure)


def session_cookie(token: str, *, secure: bool) -> str:
    """Return the cookie that has a browser show ``token`` until it is closed: to no script, to no other site."""
    encoded = base64.urlsafe_b64encode(token.encode("utf-8", "surrogatepass")).decode()
    return _cookie(encoded.rstrip("="), "", secure=secure)


def _cookie(value: str, more: str, *, secure: bool) -> str:
    name, flag = (_SECURE, "; Secure") if secure else (_COOKIE, "")
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict{flag}{more}"


def _session_of(connection: HTTPConnection) -> str | None:
    cookies = connection.cookies
    # Over TLS only the name that no other host can have set; behind a proxy both may come.
    plain = None if connection.url.scheme == "https" else cookies.get(_COOKIE)
    return cookies.get(_SECURE, plain) or None


def _token_of_session(connection: HTTPConnection) -> str | None:
    value = _session_of(connection)
    if value is None or len(value) > 2 * _TOKEN:
        return None
    try:
        padded = value.encode("ascii") + b"=" * (-len(value) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
