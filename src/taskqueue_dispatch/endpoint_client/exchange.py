"""One HTTP request and its response of limited size. Errors say whether the server may have received the request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

import httpx2

from taskqueue_dispatch.endpoint_client.answers import EndpointReply
from taskqueue_dispatch.endpoint_client.streamed import READERS, Sink, StreamReader, TooLongError

_CONNECT_SECONDS = 5.0
"""maximum number of seconds for opening a connection, and again for its TLS handshake"""
_MAX_DIGITS = 18
"""maximum number of digits in ``Content-Length``"""


class NotReachedError(Exception):
    """The error if nothing was sent. Its text gives the reason, without any address."""


class NotConnectedError(NotReachedError):
    """The error if the connection could not be opened."""


class NotUsableError(Exception):
    """The error if a good response is a stream, too large or compressed, and was therefore not read to its end.

    Any other response is then returned without its body, because its status is enough. The text of the error gives the
    reason, without any content of the response.
    """


class NotWholeError(Exception):
    """The error if the server may have received the request, but no complete response arrived.

    The text gives the reason.
    """


async def exchange(
    transport: httpx2.AsyncHTTPTransport,
    request: httpx2.Request,
    limit: int,
    *,
    among: int = 1,
    opening: Callable[[], Awaitable[None]] | None = None,
) -> EndpointReply:
    """Send a request, and return the complete response of at most ``limit`` bytes.

    Only connecting has a timeout here: 5 seconds, divided by ``among``, the number of addresses that the caller tries.
    The caller must limit the time of the whole call. An idle connection that the server has closed is replaced before
    anything is sent; nothing is sent twice. ``opening`` is called before a new connection is made, and may raise to
    prevent it. So may the request's extension ``ready``, which is called when the request is about to be sent. With the
    extension ``streamed``, a `Sink`, a good response may be a stream: the sink gets its values, each of at most
    ``limit`` bytes, and the last one is the body. Raises `NotReachedError`, `NotConnectedError`, `NotWholeError` or
    `NotUsableError`.
    """
    async with _Trace(opening, request.extensions.get("ready")) as trace:
        request.extensions |= {
            "timeout": httpx2.Timeout(None, connect=_CONNECT_SECONDS / among).as_dict(),
            "trace": trace,
        }
        try:
            response = await transport.handle_async_request(request)
            try:
                return await _whole(response, limit, request.extensions.get("streamed"))
            finally:
                await response.aclose()
        except (httpx2.TransportError, OSError, UnicodeError) as error:
            if trace.sent and not isinstance(error, httpx2.LocalProtocolError):
                raise NotWholeError(_broken(error)) from None
            kind = NotConnectedError if trace.refused else NotReachedError
            raise kind(f"no connection ({_name(error)})") from None


class _Trace:
    """The progress of one request. The transport reports it by calling this object as its ``trace``."""

    def __init__(
        self,
        opening: Callable[[], Awaitable[None]] | None,
        ready: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.sent = False
        self.refused = False
        self._before = opening
        self._ready = ready
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
                if self._ready is not None:
                    await self._ready()
                self.sent, self._opening = True, None
            case "http11.receive_response_headers.started":
                asyncio.get_running_loop().call_soon(self._wait)
            case "http11.receive_response_headers.complete" if not self._waited:
                # The response arrived before the request was sent, so the server has sent two responses to the
                # previous request.
                raise NotWholeError("the server responded before the request was sent")

    def _wait(self) -> None:
        self._waited = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Close the connection here, because the transport does not do so if its TLS handshake is cancelled.
        if self._opening is not None:
            await self._opening.aclose()


async def _whole(response: httpx2.Response, limit: int, sink: Sink | None) -> EndpointReply:
    status, retry_after = response.status_code, response.headers.get("retry-after")
    try:
        _check_encoding(response)
        if (make := READERS.get(_media_type(response))) is None:
            return EndpointReply(status, await _body(response, limit), retry_after)
        body = await _last_value(response, make(limit), sink)
        return EndpointReply(status, body, retry_after, streamed=True)
    except TooLongError:
        raise NotUsableError(_too_long(status, limit)) from None
    except NotUsableError:
        if response.is_success:
            raise
        return EndpointReply(status, b"", retry_after)


async def _last_value(response: httpx2.Response, reader: StreamReader, sink: Sink | None) -> bytes:
    """Pass the values of a stream on while they arrive, and return the last one; nothing if there was none."""
    status = response.status_code
    if sink is None or not response.is_success:
        raise NotUsableError(f"HTTP {status}: the response is a stream, which is not supported")
    body = b""
    async for part in response.aiter_raw():
        for value in reader.feed(part):
            body = value.value
            await sink(value)
    for value in reader.feed(b"", last=True):
        body = value.value
        await sink(value)
    return body


def _media_type(response: httpx2.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


def _check_encoding(response: httpx2.Response) -> None:
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise NotUsableError(
            f"HTTP {response.status_code}: the response is compressed, which was not requested"
        )


async def _body(response: httpx2.Response, limit: int) -> bytes:
    status, headers = response.status_code, response.headers
    text = headers.get("content-length", "")
    if len(text) > _MAX_DIGITS or (text.isdigit() and int(text) > limit):
        raise NotUsableError(_too_long(status, limit))
    parts: list[bytes] = []
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > limit:
            raise NotUsableError(_too_long(status, limit))
        parts.append(part)
    return b"".join(parts)


def _too_long(status: int, limit: int) -> str:
    return f"HTTP {status}: the response is longer than the answer_limit of {limit} bytes"


def _broken(error: Exception) -> str:
    if isinstance(error, httpx2.RemoteProtocolError):
        return "the response ended early or is not HTTP"
    return f"the connection broke ({_name(error)})"


def _name(error: BaseException) -> str:
    """Return the type name of the error's root cause."""
    if isinstance(error, httpx2.TimeoutException):
        return TimeoutError.__name__
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    if isinstance(error, BaseExceptionGroup):
        return _name(error.exceptions[0])
    return type(error).__name__
