"""The HTTP client for a server. It distinguishes requests that had no effect from those that may have had one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import httpx2
import msgspec

from taskqueue_core.client_security import check_token, trusting, warn_if_readable
from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    PublishUnconfirmed,
    TaskQueueError,
)
from taskqueue_core.server_address import ServerAddress
from taskqueue_remote.problems import problem_of, to_error

TIME_HEADER = "taskqueue-time"
"""name of the response header with the time of the response by the store's clock, in Unix seconds"""

_DRIFT_PER_SECOND = 1e-4
"""assumed maximum drift between the clocks of two machines, in seconds per second"""


class RemoteClock:
    """An estimate of the store's clock, based on the response with the shortest round trip.

    The uncertainty of an estimate grows with its age, so that a newer estimate eventually replaces it. Before the first
    response, the estimate is the clock of this machine.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        system: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._offset = system() - monotonic()
        self._uncertainty = float("inf")
        self._learned_at = monotonic()

    def now(self) -> float:
        """Return the estimated time of the store in Unix seconds."""
        return self._offset + self._monotonic()

    def learn(self, header: str | None, requested: float) -> None:
        """Update the estimate from the time header of a response that has just been received.

        ``requested`` is the monotonic time at which the request was sent.
        """
        try:
            value = float(header or "nan")
        except ValueError:
            return
        received = self._monotonic()
        uncertainty = (received - requested) / 2
        limit = self._uncertainty + (received - self._learned_at) * _DRIFT_PER_SECOND
        if uncertainty <= limit and 0 < value < float("inf"):
            self._offset = value - (requested + received) / 2
            self._uncertainty, self._learned_at = uncertainty, received


T = TypeVar("T")
JSON = "application/json"
NDJSON = "application/x-ndjson"
REPEAT = "repeat the call; tasks with the same id, and retries with the same token, are stored once"

_TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
# Close idle connections earlier than most servers do, so that a request rarely uses one that the server has closed.
_POOL = httpx2.Limits(max_connections=20, max_keepalive_connections=20, keepalive_expiry=2.0)
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_CONNECTION_LOST = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
_SUCCESS = range(200, 300)
_UNAVAILABLE = 503


class Answer(msgspec.Struct, frozen=True):
    """A complete HTTP response, with any status."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is a success (2xx)."""
        return self.status in _SUCCESS


class HttpClient:
    """An HTTP client for one server. It connects at the first request, and allows concurrent requests."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        *,
        tls_ca: Path | str | None = None,
        start_command: str = "taskqueue serve",
    ) -> None:
        """Check the address and the token, without connecting. Raises `ConfigurationError` if either is invalid.

        ``tls_ca`` is a PEM file with the certificate authorities to trust, instead of those of the system. If the
        server cannot be reached, the error suggests running ``start_command``.
        """
        self.address = ServerAddress.of(url)
        check_token(token)
        warn_if_readable(self.address.shown, token, loopback=self.address.loopback)
        self._tls_ca = tls_ca
        self._start_command = start_command
        self._transport = transport
        self.clock = RemoteClock()
        self._token = token
        self._client: httpx2.AsyncClient | None = None

    async def ask(
        self,
        method: str,
        target: str,
        kind: type[T],
        *,
        body: object = None,
        query: Mapping[str, str | int] | None = None,
    ) -> T:
        """Send a request and return the decoded response. On failure, raise a `TaskQueueError`."""
        answer = await self.fetch(method, target, body=body, query=query)
        if not answer.ok:
            raise self.error(answer)
        return self.decode(answer.body, kind)

    async def fetch(
        self,
        method: str,
        target: str,
        *,
        body: object = None,
        query: Mapping[str, str | int] | None = None,
        seconds: float | None = None,
    ) -> Answer:
        """Send a request and return the response, whatever its status. Raises `BackendUnavailable` if there is none.

        A GET request is repeated once if the connection is lost. ``seconds`` limits the total time.
        """
        content = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._send(method, target, content, JSON, query)
                except _CONNECTION_LOST:
                    if method != "GET":
                        raise
                    # The server has probably just closed an idle connection. Repeat the request on a new connection.
                    return await self._send(method, target, content, JSON, query)
        except (TimeoutError, httpx2.HTTPError) as error:
            raise self._no_answer(error) from None

    async def post_once(self, target: str, content: bytes, content_type: str = JSON) -> Answer:
        """Send a POST request without ever repeating it, and return the response.

        The response may have an error status such as 400. Raises `BackendUnavailable` if the server or its store was
        unavailable and the request had no effect, and `PublishUnconfirmed` if the request may have had an effect.
        """
        try:
            answer = await self._send("POST", target, content, content_type, None)
        except _NEVER_SENT as error:
            raise self._no_answer(error) from None
        except httpx2.HTTPError as error:
            raise PublishUnconfirmed(
                f"the response from {self.address.shown} was lost ({type(error).__name__}): {REPEAT}"
            ) from None
        failure = None if answer.ok else self.error(answer)
        # With status 503, or with the code of `BackendUnavailable`, the request was not executed. With any other server
        # error, for example status 502 or 504 from a proxy, it may have been executed.
        if (
            isinstance(failure, BackendUnavailable)
            and answer.status != _UNAVAILABLE
            and problem_of(answer.status, answer.body).code != BackendUnavailable.code
        ):
            raise PublishUnconfirmed(f"{failure}: {REPEAT}")
        if isinstance(failure, BackendUnavailable | PublishUnconfirmed):
            raise failure
        return answer

    def error(self, answer: Answer) -> TaskQueueError:
        """Return the exception for a response whose status is not a success."""
        return to_error(problem_of(answer.status, answer.body), self.address.shown)

    def decode(self, body: bytes, kind: type[T]) -> T:
        """Decode the JSON body of a response. Raises `ConfigurationError` if it does not match ``kind``."""
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the server at {self.address.shown} is not a taskqueue server, or has an incompatible version: {error}"
            ) from None

    async def aclose(self) -> None:
        """Close all connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _send(
        self,
        method: str,
        target: str,
        content: bytes | None,
        content_type: str,
        query: Mapping[str, str | int] | None,
    ) -> Answer:
        client = self._client = self._client or self._connect()
        headers = {} if content is None else {"content-type": content_type}
        requested = time.monotonic()
        response = await client.request(
            method, target, content=content, headers=headers, params=dict(query) if query else None
        )
        self.clock.learn(response.headers.get(TIME_HEADER), requested)
        return Answer(response.status_code, response.content)

    def _connect(self) -> httpx2.AsyncClient:
        requests_log = logging.getLogger("httpx2")
        level = requests_log.getEffectiveLevel()
        if requests_log.level == logging.NOTSET and level >= logging.INFO:  # it logs each request
            requests_log.setLevel(max(level, logging.WARNING))
        headers = {"accept": f"{JSON}, {NDJSON}", "user-agent": "taskqueue"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        try:
            return httpx2.AsyncClient(
                base_url=self.address.http_base,
                headers=headers,
                timeout=_TIMEOUT,
                limits=_POOL,
                transport=self._transport,
                # Loading the certificates takes 0.1 s, so load them only for a TLS connection.
                verify=(trusting(self._tls_ca) or True) if self.address.tls else False,
                trust_env=not self.address.loopback,  # use no proxy for a server on this machine
            )
        except httpx2.InvalidURL as error:
            raise ConfigurationError(
                f"invalid server URL (TASKQUEUE_SERVER_URL): {error}"
            ) from None

    def _no_answer(self, error: Exception) -> BackendUnavailable:
        return BackendUnavailable(
            f"no response from a server at {self.address.shown} ({type(error).__name__}: {error}): "
            f"start one with '{self._start_command}', or set TASKQUEUE_SERVER_URL"
        )
