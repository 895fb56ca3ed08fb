"""The HTTP client for GPU servers, which sends all requests to endpoints and limits the size of responses."""

from __future__ import annotations

import contextlib
import logging
import math
import ssl
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import anyio
import httpx2

from taskqueue_core.capabilities import Endpoint, Seen, SlotLease
from taskqueue_core.client_security import trusting
from taskqueue_core.tasks import Task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.address_pinning import (
    AddressNotAllowedError,
    ask_the_system,
)
from taskqueue_dispatch.endpoint_client.answers import (
    Answer,
    EndpointReply,
    EndpointUnreachable,
    JobFailedAnswer,
    read,
    read_observed,
    read_status,
)
from taskqueue_dispatch.endpoint_client.exchange import (
    NotReachedError,
    NotUsableError,
    NotWholeError,
    exchange,
)
from taskqueue_dispatch.endpoint_client.streamed import Sink
from taskqueue_dispatch.endpoint_client.transports import Transports
from taskqueue_dispatch.endpoint_policy import EndpointPolicy
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.outbound_http.dns import Resolve

_POLL_SECONDS = 10.0
_HEALTH_SECONDS = 5.0
_ACCEPT_SECONDS = 60.0
"""seconds within which a server must accept a job of an async model"""
_HEALTH_LIMIT = 1024 * 1024
_SCHEMES = frozenset({"http", "https"})
_MAX_PORT = 65_535
_MAX_WARNED = 1000
_UNUSABLE = "unusable_answer"
_log = logging.getLogger("taskqueue.dispatch")
_GET_HEADERS = (
    ("accept", "application/json"),
    ("accept-encoding", "identity"),
    ("user-agent", "taskqueue-dispatch"),
)
_POST_HEADERS = (*_GET_HEADERS, ("content-type", "application/json"), ("x-source", "dispatcher"))
_STREAMING_HEADERS = (
    ("accept", "application/json, application/x-ndjson;q=0.9, text/event-stream;q=0.9"),
    *_POST_HEADERS[1:],
)


class EndpointClient:
    """A client for GPU servers that reuses its connections.

    Use it in one event loop, for any number of concurrent calls.

    It follows no redirects, uses no proxy, cookie or credential from the environment, and verifies certificates. A host
    name that is not listed in ``endpoints_allowed`` is resolved for each connection; if it has a forbidden address, no
    connection is made, and the call returns the same as for a server that cannot be reached. Whatever a server does, a
    call ends in time, reads no more than its limit, and does not raise.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        *,
        tls_ca: Path | str | None = None,
        resolve: Resolve = ask_the_system,
    ) -> None:
        """Create a client.

        The only I/O is reading ``tls_ca``, a PEM file of certificate authorities to trust instead of the system's.
        """
        trust = trusting(tls_ca, setting="TASKQUEUE_DISPATCH_TLS_CA")
        self._limit = settings.answer_limit
        self._health = min(_HEALTH_SECONDS, settings.health_interval)
        self._transports = Transports(
            ssl.create_default_context if trust is None else lambda: trust,
            EndpointPolicy(settings.endpoints_allowed),
            resolve,
        )
        self._warned: set[tuple[str, str] | None] = set()
        """models and servers of the endpoints for which a forbidden address has been logged"""

    async def send(
        self,
        lease: SlotLease,
        task: Task,
        config: ModelConfig,
        *,
        attempt: int,
        limited: bool = True,
        ready: Callable[[], Awaitable[None]] | None = None,
        streamed: Sink | None = None,
    ) -> Answer:
        """POST a job to the server of a lease, and return what its answer means.

        The server gets the task's payload unchanged, the task's id as ``X-Job-Id`` and ``Idempotency-Key``, the number
        of the attempt, and the lease's token for pushing the result. It never gets the client's callback URL.
        ``X-Model-Switched: true`` means that the server's previous job was for another model. A sync model must answer
        within ``max_poll_time``, or the attempt has failed, unless the call is not ``limited``; an async model must
        accept the job within that time or a minute, whichever is shorter. This time counts from when the job is sent;
        if it could not be sent within the same time, it was not sent. ``ready`` is called when a connection is open and
        the job is about to be sent; if it raises `NotReachedError`, the job is not sent. ``streamed`` gets what the
        server streams; the last value is its answer. Without it, a stream fails the job.
        """
        headers = [
            *(_POST_HEADERS if streamed is None else _STREAMING_HEADERS),
            ("idempotency-key", task.id),
            ("x-job-id", task.id),
            ("x-attempt", str(attempt)),
            ("x-lease-token", lease.token),
        ]
        if lease.switched:
            headers.append(("x-model-switched", "true"))
        sync = config.model_type is ModelType.SYNC
        timeout = config.max_poll_time if sync else min(_ACCEPT_SECONDS, config.max_poll_time)
        if sync and not limited:
            timeout = math.inf
        sent = False

        async def begin() -> None:
            nonlocal sent
            if ready is not None:
                await ready()
            sent, request.extensions["limit"].deadline = True, anyio.current_time() + timeout

        try:
            request = httpx2.Request(
                "POST", _address(lease.url), headers=headers, content=task.payload
            )
            request.extensions |= {"ready": begin, "streamed": streamed}
            target = lease.model, lease.server
            reply = await self._call(request, timeout, self._limit, target)
        except NotUsableError as error:
            return JobFailedAnswer(str(error), final=True, reason=_UNUSABLE)
        except TimeoutError:
            if sync and sent:
                return JobFailedAnswer(
                    f"no complete response within the max_poll_time of {timeout:g} s"
                )
            return _timed_out(timeout, sent=sent)
        except (NotReachedError, NotWholeError) as error:
            return _unreachable(error)
        return read(reply, task.id, config)

    async def ask(self, url: str, job_id: str, config: ModelConfig) -> Answer:
        """Poll a server for a job. ``job_id`` is the id under which the server knows the job.

        Return `EndpointUnreachable` if the model has no ``poll_endpoint_template``.
        """
        template = config.poll_endpoint_template
        if template is None:
            return EndpointUnreachable("the model has no poll_endpoint_template", sent=False)
        path = template.replace("{id}", quote(job_id, safe=""))
        try:
            reply = await self._call(_get(url, path), _POLL_SECONDS, self._limit)
        except NotUsableError as error:
            return JobFailedAnswer(str(error), final=True, reason=_UNUSABLE)
        except TimeoutError:
            return _timed_out(_POLL_SECONDS)
        except (NotReachedError, NotWholeError) as error:
            return _unreachable(error)
        return read_status(reply, job_id, config)

    async def cancel(self, url: str, job_id: str, config: ModelConfig) -> None:
        """Ask a server to cancel a job. Its answer is ignored: only a poll or a report shows that the job has ended."""
        path = (config.poll_endpoint_template or "").replace("{id}", quote(job_id, safe=""))
        with contextlib.suppress(NotUsableError, NotReachedError, NotWholeError, TimeoutError):
            await self._call(_get(url, path, "DELETE"), _POLL_SECONDS, self._limit)

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:
        """Return the health report of an endpoint's server, or ``None`` if no valid report arrives in time."""
        try:
            request = _get(endpoint.url, config.health_path)
            target = endpoint.model, endpoint.server
            reply = await self._call(request, self._health, _HEALTH_LIMIT, target)
        except (NotUsableError, NotReachedError, NotWholeError, TimeoutError):
            return None
        return read_observed(reply)

    async def aclose(self) -> None:
        """Close all connections; a connection in use is closed when its call has ended.

        Later calls open new connections.
        """
        await self._transports.aclose()

    async def _call(
        self,
        request: httpx2.Request,
        timeout: float,
        limit: int,
        target: tuple[str, str] | None = None,
    ) -> EndpointReply:
        async with self._transports.to(_origin(request.url)) as server:
            # Do not use asyncio.timeout: the transport shields the closing of idle connections only from anyio's
            # cancellation.
            with anyio.fail_after(timeout) as request.extensions["limit"]:
                if server.pin is None:
                    return await exchange(server.transport, request, limit)
                try:
                    reply = await server.pin.exchange(server.transport, request, limit)
                except AddressNotAllowedError:
                    self._warn_once(target)
                    raise
                self._warned.discard(target)
                return reply

    def _warn_once(self, target: tuple[str, str] | None) -> None:
        """Log that an endpoint's host has a forbidden address, but only once until the endpoint answers again."""
        if target is None or target in self._warned:
            return
        if len(self._warned) >= _MAX_WARNED:
            self._warned.clear()
        self._warned.add(target)
        model, server = target
        _log.warning(
            "endpoint not called: its host name resolves to an address that is not allowed",
            extra={"model": model, "server": server},
        )


def _get(url: str, path: str, method: str = "GET") -> httpx2.Request:
    try:
        requested = _address(url).copy_with(raw_path=path.encode("ascii"))
    except (httpx2.InvalidURL, UnicodeError):
        raise NotReachedError("the URL of the endpoint is not valid") from None
    return httpx2.Request(method, requested, headers=_GET_HEADERS)


@lru_cache(maxsize=4096)
def _address(url: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        raise NotReachedError("the URL of the endpoint is not valid") from None
    if parsed.scheme not in _SCHEMES or not parsed.host or (parsed.port or 0) > _MAX_PORT:
        raise NotReachedError("the URL of the endpoint is not valid")
    return parsed


def _origin(url: httpx2.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _unreachable(error: NotReachedError | NotWholeError) -> EndpointUnreachable:
    return EndpointUnreachable(str(error), sent=isinstance(error, NotWholeError))


def _timed_out(timeout: float, *, sent: bool = True) -> EndpointUnreachable:
    error = "no complete response" if sent else "the job could not be sent"
    return EndpointUnreachable(f"{error} within {timeout:g} s", sent=sent)
