"""One POST to a place that was checked: to its addresses and no others, bounded in time and size."""

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

from taskqueue_dispatch.outbound_http.errors import NotReached
from taskqueue_dispatch.outbound_http.url_policy import Checked

_BODY = 64 * 1024
_BODY_SECONDS = 2.0
"""for what follows a status that is known already"""
_CONNECT_SECONDS = 5.0
_ADDRESSES = 3
"""that are tried, where one refuses to be connected to"""
_ONE = httpx2.Limits(max_connections=1, max_keepalive_connections=0)


class PostReply(msgspec.Struct, frozen=True):
    """What came back, without a word of what it said."""

    status: int
    length: int
    """bytes of its body that were read, at most 64 KiB"""
    retry_after: float | None = None
    """seconds"""


@cache  # the authorities take a twentieth of a second to load
def trusted() -> ssl.SSLContext:
    """Return what trusts the system's authorities, verifies names, and speaks TLS 1.2 or later: one for all."""
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
    """Send one POST and return its reply, whatever its status; a redirect is a reply, and nothing is followed.

    It connects to the checked addresses, in turn as long as none is connected to, with the host's name for TLS and
    in ``Host``. Proxies of the environment are left out, and so are cookies and compression. The status and headers
    come within that many seconds; two more are for what is read of the body. Raises `NotReached`.
    """
    # A transport for each: a connection that was made for one name must never serve another.
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
    """Closes what was opened. The transport itself leaves a socket behind whose TLS was cancelled on the way."""

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
    # The status has decided. The body is read for the sender's sake, who may not like to be cut off, and only so far.
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
        return "its certificate is not valid"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "the TLS handshake failed"
    if isinstance(error, httpx2.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx2.ConnectError):
        return "no connection"
    return "no complete response"
