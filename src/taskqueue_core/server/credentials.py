"""What a request shows of who makes it."""

from __future__ import annotations

from starlette.requests import HTTPConnection

__all__ = ["peer_of", "token_of"]


def token_of(connection: HTTPConnection) -> str | None:
    """Return the bearer token of the ``Authorization`` header, ``None`` where there is none."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def peer_of(connection: HTTPConnection) -> str:
    """Return the address it came from, as far as it is known."""
    return connection.client.host if connection.client else ""
