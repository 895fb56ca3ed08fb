"""One request and its whole answer, within bounds, and what may have become of it where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import httpx2

from taskqueue_dispatch.endpoint_client.answers import EndpointReply

_CONNECT = 5.0
"""seconds for a connection, and as many for its TLS"""
_ANY = 18
"""digits that a length may have"""


class NotReachedError(Exception):
    """Nothing was sent. Its text says why, and shows no address."""


class NotConnectedError(NotReachedError):
    """Nothing listens there, as far as can be told."""


class NotUsableError(Exception):
    """The answer is not read to its end. Its text says why, and shows none of it."""


class NotWholeError(Exception):
    """The server may have got the request, and there is no complete response. Its text is as that of the others."""


async def exchange(
    transport: httpx2.AsyncHTTPTransport,
    request: httpx2.Request,
    limit: int,
    *,
    among: int = 1,
    opening: Callable[[], Awaitable[None]] | None = None,
) -> EndpointReply:
    """Send a request, and return the whole answer, of ``limit`` bytes at most. It takes its time: bound it.

    A connection that the server has closed while nobody used it is replaced before anything is sent; nothing is ever
    sent twice. The time for a connection is shared ``among`` so many addresses. ``opening`` is called before a
    connection is made, and may raise instead. Raises `NotReachedError`, `NotConnectedError`, `NotWholeError` or
    `NotUsableError`.
    """
    async with _Course(opening) as course:
        request.extensions |= {
            "timeout": httpx2.Timeout(None, connect=_CONNECT / among).as_dict(),
            "trace": course,
        }
        try:
            response = await transport.handle_async_request(request)
            try:
                return await _whole(response, limit)
            finally:
                await response.aclose()
        except (httpx2.TransportError, OSError, UnicodeError) as error:
            if course.sent and not isinstance(error, httpx2.LocalProtocolError):
                raise NotWholeError(_broken(error)) from None
            kind = NotConnectedError if course.refused else NotReachedError
            raise kind(f"no connection ({_name(error)})") from None


class _Course:
    """How far a call has come, as the transport tells it: an asynchronous function, for its ``trace``."""

    def __init__(self, opening: Callable[[], Awaitable[None]] | None) -> None:
        self.sent = False
        self.refused = False
        self._before = opening
        self._opening: Any = None
        self._waited = False

    async def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        match event:
            case "connection.connect_tcp.started" if self._before is not None:
                await self._before()
            case "connection.connect_tcp.failed":
                self.refused = True
            case "connection.connect_tcp.complete":
                self._opening = fields["return_value"]
            case "http11.send_request_headers.started":
                self.sent, self._opening = True, None
            case "http11.receive_response_headers.started":
                asyncio.get_running_loop().call_soon(self._wait)
            case "http11.receive_response_headers.complete" if not self._waited:
                # It was there before anybody waited for it: more than one answer has come to the request before.
                raise NotWholeError("it responded before the request was sent")

    def _wait(self) -> None:
        self._waited = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._opening is not None:  # the transport forgets one whose TLS is cancelled on the way
            await self._opening.aclose()


async def _whole(response: httpx2.Response, limit: int) -> EndpointReply:
    status, headers = response.status_code, response.headers
    text = headers.get("content-length", "")
    if len(text) > _ANY or (text.isdigit() and int(text) > limit):
        raise NotUsableError(_too_long(status, limit))
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise NotUsableError(f"HTTP {status}: the response is compressed, which was not requested")
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > limit:
            raise NotUsableError(_too_long(status, limit))
        parts.append(part)
    return EndpointReply(status, b"".join(parts), headers.get("retry-after"))


def _too_long(status: int, limit: int) -> str:
    return f"HTTP {status}: the response is longer than the answer_limit of {limit} bytes"


def _broken(error: Exception) -> str:
    if isinstance(error, httpx2.RemoteProtocolError):
        return "the response ended early or is not HTTP"
    return f"the connection broke ({_name(error)})"


def _name(error: BaseException) -> str:
    """Return the kind of the first of the errors that have led to this one."""
    if isinstance(error, httpx2.TimeoutException):
        return TimeoutError.__name__
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    if isinstance(error, BaseExceptionGroup):
        return _name(error.exceptions[0])
    return type(error).__name__
