"""One HTTP client of a server: time limits, errors, and which failures leave a request's fate open."""

from __future__ import annotations

import asyncio
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
"""an answer's header: the store's time when it was made, Unix seconds"""

_DRIFT_PER_SECOND = 1e-4
"""how far two clocks may run apart, per second"""


class RemoteClock:
    """Keeps the best estimate heard so far: the one whose question was answered quickest.

    An estimate ages, so that a fresh one wins in the end. Before the first answer it is the system's clock.
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
        """Return Unix seconds of the store's clock."""
        return self._offset + self._monotonic()

    def learn(self, header: str | None, requested: float) -> None:
        """Learn from the answer, just in, to a question asked at monotonic time ``asked``."""
        if header is None:
            return
        try:
            value = float(header)
        except ValueError:
            return
        received = self._monotonic()
        uncertainty = (received - requested) / 2
        if uncertainty > self._uncertainty + (
            received - self._learned_at
        ) * _DRIFT_PER_SECOND or not 0 < value < float("inf"):
            return
        self._offset, self._uncertainty, self._learned_at = (
            value - (requested + received) / 2,
            uncertainty,
            received,
        )


T = TypeVar("T")
JSON = "application/json"
NDJSON = "application/x-ndjson"

_TIMEOUT = httpx2.Timeout(30.0, connect=5.0)
# Idle connections are given up before a server usually does, so that few requests meet a closed one.
_POOL = httpx2.Limits(max_connections=20, max_keepalive_connections=20, keepalive_expiry=2.0)
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
_CONNECTION_LOST = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError)
_SUCCESS = range(200, 300)
_UNAVAILABLE = 503


class Answer(msgspec.Struct, frozen=True):
    """A complete answer."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is one of success."""
        return self.status in _SUCCESS


class HttpClient:
    """Talks to one server. Connects at the first call; safe for concurrent use within one event loop."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        *,
        tls_ca: Path | str | None = None,
        start_command: str = "taskqueue serve",
    ) -> None:
        """Do no input or output. Raises `ConfigurationError` for an address or token that cannot be one.

        ``tls_ca`` is a file of the authorities (PEM) to trust instead of the system's; ``starts`` is the command that
        who finds no server is pointed to.
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
        """Return the decoded answer, or raise what a local backend would."""
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
        """Return an answer whatever its status. Raises `BackendUnavailable` where there is none, or none in time."""
        content = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._send(method, target, content, JSON, query)
                except _CONNECTION_LOST:
                    if method != "GET":
                        raise
                    # Likely an idle connection that the server closed just then: a new one tells.
                    return await self._send(method, target, content, JSON, query)
        except TimeoutError as error:
            raise self._no_answer(error) from None
        except httpx2.HTTPError as error:
            raise self._no_answer(error) from None

    async def post_once(self, target: str, content: bytes, content_type: str = JSON) -> Answer:
        """POST something that is to happen once, and return an answer that says whether it did.

        Raises `BackendUnavailable` only where nothing can have happened, else `PublishUnconfirmed`.
        """
        try:
            answer = await self._send("POST", target, content, content_type, None)
        except _NEVER_SENT as error:
            raise self._no_answer(error) from None
        except httpx2.HTTPError as error:
            raise PublishUnconfirmed(
                f"the response of {self.address.shown} was lost ({type(error).__name__}): "
                "publish again with the same id"
            ) from None
        failure = None if answer.ok else self.error(answer)
        if isinstance(failure, BackendUnavailable) and self._may_have_happened(answer):
            raise PublishUnconfirmed(f"{failure}: publish again with the same id")
        if isinstance(failure, BackendUnavailable | PublishUnconfirmed):
            raise failure
        return answer

    def error(self, answer: Answer) -> TaskQueueError:
        """Return the error that an answer without success stands for."""
        return to_error(problem_of(answer.status, answer.body), self.address.shown)

    def decode(self, body: bytes, kind: type[T]) -> T:
        """Decode JSON. Raises `ConfigurationError` where the server speaks otherwise."""
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the server at {self.address.shown} is not a taskqueue server, or has another version: {error}"
            ) from None

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
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
                # Certificates take a tenth of a second to load.
                verify=(trusting(self._tls_ca) or True) if self.address.tls else False,
                trust_env=not self.address.loopback,  # no proxy leads to this machine
            )
        except httpx2.InvalidURL as error:
            raise ConfigurationError(f"the address of the server is not valid: {error}") from None

    def _may_have_happened(self, answer: Answer) -> bool:
        # 503 says that it was not tried. What an unknown 500 or a proxy's 502 or 504 did, nobody knows.
        code = problem_of(answer.status, answer.body).code
        return answer.status != _UNAVAILABLE and code != BackendUnavailable.code

    def _no_answer(self, error: Exception) -> BackendUnavailable:
        return BackendUnavailable(
            f"no response from a server at {self.address.shown} ({type(error).__name__}: {error}): "
            f"start one with '{self._start_command}', or set TASKQUEUE_SERVER_URL"
        )
