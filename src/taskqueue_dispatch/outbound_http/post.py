"""A POST request to a checked URL, which connects only to checked addresses and is limited in time and size."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Self

import httpx2
import msgspec

from taskqueue_dispatch.outbound_http.dns import NotReached
from taskqueue_dispatch.outbound_http.url_policy import Checked

_BODY = 64 * 1024
_BODY_SECONDS = 2.0
"""maximum number of seconds for reading the body of the response"""
_CONNECT_SECONDS = 5.0
_ADDRESSES = 3
"""maximum number of addresses that are tried until a connection succeeds"""
_ONE = httpx2.Limits(max_connections=1, max_keepalive_connections=0)


class PostReply(msgspec.Struct, frozen=True):
    """The response to a POST request, without its content."""

    status: int
    length: int
    """number of bytes of the body that were read, at most 64 KiB"""
    retry_after: float | None = None
    """seconds from the header ``Retry-After``"""


@cache  # cached, because loading the certificate authorities takes 50 ms
def trusted() -> ssl.SSLContext:
    """Return a shared TLS context with the system's certificate authorities, host name checks and TLS 1.2 or later."""
    context = httpx2.create_ssl_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


async def post(
    checked: Checked,
    body: bytes,
    headers: Mapping[str, str],
    *,
    tls: ssl.SSLContext,
    within: float,
) -> PostReply:
    """Send one POST and return the response, whatever its status. Redirects are not followed.

    Up to three checked addresses are tried until a connection succeeds; TLS and the ``Host`` header use the host's
    name. Proxies from the environment, cookies and compression are not used. Status and headers must arrive within
    ``within`` seconds; reading the body may take two more seconds. Raises `NotReached`.
    """
    # Use one transport per request, because a connection made for one name must never be used for another.
    async with (
        _Opened() as opened,
        httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, limits=_ONE) as transport,
    ):
        try:
            async with asyncio.timeout(within):
                response = await _answer(transport, checked, body, headers, opened)
        except TimeoutError:
            raise NotReached("no answer in time") from None
        except httpx2.HTTPError as error:
            raise NotReached(_why(error)) from None
        try:
            length = await _length(response)
        finally:
            await response.aclose()
    after = _seconds(response.headers.get("retry-after"), time.time())
    return PostReply(response.status_code, length, after)


class _Opened:
    """A context manager that closes connections, because the transport leaks sockets of cancelled TLS handshakes."""

    def __init__(self) -> None:
        self._streams: list[Any] = []

    async def __call__(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._streams.append(fields["return_value"])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            await stream.aclose()


async def _answer(
    transport: httpx2.AsyncHTTPTransport,
    checked: Checked,
    body: bytes,
    headers: Mapping[str, str],
    opened: _Opened,
) -> httpx2.Response:
    *first, last = checked.addresses[:_ADDRESSES]
    for address in first:
        request = _request(address, checked, body, headers, opened)
        with contextlib.suppress(httpx2.ConnectError, httpx2.ConnectTimeout):
            return await transport.handle_async_request(request)
    return await transport.handle_async_request(_request(last, checked, body, headers, opened))


def _request(
    address: str, checked: Checked, body: bytes, headers: Mapping[str, str], opened: _Opened
) -> httpx2.Request:
    parts = checked.parts
    host = f"[{address}]" if ":" in address else address
    return httpx2.Request(
        "POST",
        f"{parts.scheme}://{host}:{parts.port}{parts.target}",
        headers={
            **headers,
            "host": parts.authority,
            "accept-encoding": "identity",
            "connection": "close",
        },
        content=body,
        extensions={
            "timeout": httpx2.Timeout(None, connect=_CONNECT_SECONDS).as_dict(),
            "sni_hostname": parts.host,
            "trace": opened,
        },
    )


async def _length(response: httpx2.Response) -> int:
    # Only the status matters, but read up to 64 KiB of the body, so that the receiver can send a short body to its end.
    length = 0
    with contextlib.suppress(httpx2.HTTPError, TimeoutError):
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in response.aiter_raw():
                length += len(piece)
                if length >= _BODY:
                    break
    return min(length, _BODY)


def _seconds(text: str | None, now: float) -> float | None:
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) < len("1000000000"):
        return float(text)
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    return None


def _why(error: Exception) -> str:
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return "the receiver's certificate is not valid"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "the TLS handshake failed"
    if isinstance(error, httpx2.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx2.ConnectError):
        return "no connection"
    return "no complete response"
