"""Credentials of a request: a bearer token in the ``Authorization`` header or in a session cookie."""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.types import Scope

from taskqueue_server.auth.origins import is_own_origin
from taskqueue_server.auth.sessions import Session

LIMITED = "taskqueue.limited"
"""name of the ASGI extension with two functions: one lifts a connection's limits, one names the client of a proxy"""
_COOKIE = "taskqueue-session"
_SECURE = f"__Host-{_COOKIE}"
"""name of the cookie over TLS; browsers accept a ``__Host-`` cookie only over TLS, and only from the host itself"""
_SESSION = "taskqueue.session"
"""name of the entry of the ASGI scope with the session that `set_session` has set"""


def token_of(connection: HTTPConnection) -> str | None:
    """Return the bearer token in the ``Authorization`` header, or of the session if there is no such header.

    Return ``None`` if there is no token, or the header is invalid. A WebSocket has no session, so that no web page can
    open the socket with the session of its user.
    """
    shown = connection.headers.getlist("authorization")
    if not shown:
        session = session_of(connection)
        return None if session is None else session.token
    scheme, _, token = shown[0].partition(" ")
    return token.strip() if len(shown) == 1 and scheme.lower() == "bearer" else None


def shows_header(connection: HTTPConnection) -> bool:
    """Return whether the request has an ``Authorization`` header, valid or not."""
    return "authorization" in connection.headers


def by_cookie(connection: HTTPConnection) -> bool:
    """Return whether the session cookie is the only credential: then another site may have caused the request."""
    return not shows_header(connection) and secret_of(connection) is not None


def session_of(connection: HTTPConnection) -> Session | None:
    """Return the session of the request, if `set_session` has found one."""
    session: Session | None = connection.scope.get(_SESSION)
    return session


def set_session(connection: HTTPConnection, session: Session | None) -> None:
    """Keep the session of the request for `token_of`."""
    connection.scope[_SESSION] = session


def mark_authenticated(scope: Scope) -> None:
    """Lift the limits of a connection whose client has shown a valid credential. Idempotent."""
    offered = scope.get("extensions", {}).get(LIMITED)
    if offered is not None:
        offered["authenticate"]()


def name_client(scope: Scope) -> None:
    """Count the connection of a trusted proxy for the client that sent the request, until the client authenticates."""
    offered, client = scope.get("extensions", {}).get(LIMITED), scope.get("client")
    if offered is not None and client is not None:
        offered["count_for"](client[0])


def peer_of(connection: HTTPConnection) -> str:
    """Return the client's address, or an empty string if it is unknown."""
    return connection.client.host if connection.client else ""


def login_cookie(connection: HTTPConnection, secret: str, origins: Collection[str]) -> str:
    """Return the ``Set-Cookie`` header for the secret of a session.

    ``origins`` are the origins in the settings. Behind a proxy that terminates TLS, an ``Origin`` header that is in
    ``origins`` and starts with ``https:`` shows that the browser uses TLS.
    """
    scheme, origin = connection.url.scheme, connection.headers.get("origin", "")
    secure = scheme == "https" or (
        origin.startswith("https:") and is_own_origin(connection.headers, scheme, origins)
    )
    return session_cookie(secret, secure=secure)


def logout_cookie(connection: HTTPConnection) -> str:
    """Return the ``Set-Cookie`` header that ends the session of the request."""
    secure = connection.url.scheme == "https" or _SECURE in connection.cookies
    return _cookie("", "; Max-Age=0", secure=secure)


def session_cookie(secret: str, *, secure: bool) -> str:
    """Return the ``Set-Cookie`` header for the secret of a session.

    Browsers hide the cookie from scripts, and do not send it with requests from other sites.
    """
    return _cookie(secret, "", secure=secure)


def _cookie(value: str, more: str, *, secure: bool) -> str:
    name, flag = (_SECURE, "; Secure") if secure else (_COOKIE, "")
    return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict{flag}{more}"


def secret_of(connection: HTTPConnection) -> str | None:
    """Return the content of the session cookie, whether or not there is such a session."""
    cookies = connection.cookies
    # With TLS, accept only the `__Host-` cookie: no other host can set it. Without TLS, for example behind a proxy,
    # accept both cookies.
    plain = None if connection.url.scheme == "https" else cookies.get(_COOKIE)
    return cookies.get(_SECURE, plain) or None
