"""The caller: every request to a server of an endpoint goes out here, and its answer is read within bounds."""

from __future__ import annotations

import logging
import ssl
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import anyio
import httpx2

from taskqueue_core.capabilities import Endpoint, Seen, SlotLease
from taskqueue_core.client_security import trusting
from taskqueue_core.tasks import Task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.address_pinning import ElsewhereError, Pins, ask_the_system
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
from taskqueue_dispatch.endpoint_client.transports import Transports
from taskqueue_dispatch.endpoint_policy import Allowed
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.outbound_http.dns import Resolve

_ASK = 10.0
_HEALTH = 5.0
_TAKE = 60.0
"""seconds for a server to take the job of an async model"""
_HEALTH_LIMIT = 1024 * 1024
_SCHEMES = frozenset({"http", "https"})
_PORT = 65_535
_MANY = 1000
_log = logging.getLogger("taskqueue.dispatch")
_ASKING = (
    ("accept", "application/json"),
    ("accept-encoding", "identity"),
    ("user-agent", "taskqueue-dispatch"),
)
_SENDING = (*_ASKING, ("content-type", "application/json"), ("x-source", "dispatcher"))


class Caller:
    """Calls servers, over connections that it keeps. One event loop; any number of calls at once.

    No redirect is followed, no proxy, cookie or credential of the environment used, and certificates are verified.
    A name that ``endpoints_allowed`` does not have is looked up for each connection: one that leads elsewhere is
    `EndpointUnreachable`, and nothing is connected to.
    Whatever a server does, a call ends in time and reads no more than it may; none raises for it.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        *,
        tls_ca: Path | str | None = None,
        resolve: Resolve = ask_the_system,
    ) -> None:
        """Do no input or output but to read ``tls_ca``, authorities (PEM) to trust instead of the system's."""
        trust = trusting(tls_ca, setting="TASKQUEUE_DISPATCH_TLS_CA")
        self._limit = settings.answer_limit
        self._health = min(_HEALTH, settings.health_interval)
        self._pins = Pins(Allowed(settings.endpoints_allowed), resolve)
        self._transports = Transports(
            ssl.create_default_context if trust is None else lambda: trust, self._pins
        )
        self._elsewhere: set[tuple[str, str] | None] = set()
        """endpoints of which it was logged that their names lead elsewhere"""

    async def send(
        self, lease: SlotLease, task: Task, config: ModelConfig, *, attempt: int
    ) -> Answer:
        """POST a job to the server of a lease, and return what it says.

        The server gets the task's payload as it is, its id as ``X-Job-Id`` and ``Idempotency-Key``, the attempt, and
        the lease's token to push the result with: never where the client wants to have it. ``X-Model-Switched: true``
        says that it was given a job of another model before. A sync model has
        `max_poll_time` to answer, after which the job has failed; an async one is to take it within a minute.
        """
        headers = [
            *_SENDING,
            ("idempotency-key", task.id),
            ("x-job-id", task.id),
            ("x-attempt", str(attempt)),
            ("x-lease-token", lease.token),
        ]
        if lease.switched:
            headers.append(("x-model-switched", "true"))
        sync = config.model_type is ModelType.SYNC
        patience = config.max_poll_time if sync else min(_TAKE, config.max_poll_time)
        try:
            request = httpx2.Request(
                "POST", _address(lease.url), headers=headers, content=task.payload
            )
            target = lease.model, lease.server
            reply = await self._call(request, patience, self._limit, target)
        except NotUsableError as error:
            return JobFailedAnswer(str(error))
        except TimeoutError:
            if sync:
                return JobFailedAnswer(
                    f"no complete response within the max_poll_time of {patience:g} s"
                )
            return _late(patience)
        except (NotReachedError, NotWholeError) as error:
            return _unreachable(error)
        return read(reply, task.id, config)

    async def ask(self, url: str, job_id: str, config: ModelConfig) -> Answer:
        """Ask the server of an endpoint's URL for a job, by the id that it has there.

        `EndpointUnreachable` where the model has no ``poll_endpoint_template``: nobody can be asked then.
        """
        template = config.poll_endpoint_template
        if template is None:
            return EndpointUnreachable("the model has no poll_endpoint_template", sent=False)
        path = template.replace("{id}", quote(job_id, safe=""))
        try:
            reply = await self._call(_get(url, path), _ASK, self._limit)
        except NotUsableError as error:
            return JobFailedAnswer(str(error))
        except TimeoutError:
            return _late(_ASK)
        except (NotReachedError, NotWholeError) as error:
            return _unreachable(error)
        return read_status(reply, job_id, config)

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:
        """Ask an endpoint's server how it is; ``None`` where it does not answer as one that is well."""
        try:
            request = _get(endpoint.url, config.health_path)
            target = endpoint.model, endpoint.server
            reply = await self._call(request, self._health, _HEALTH_LIMIT, target)
        except (NotUsableError, NotReachedError, NotWholeError, TimeoutError):
            return None
        return read_observed(reply)

    async def aclose(self) -> None:
        """Close every connection, those of calls under way once these have ended. Later calls open new ones."""
        await self._transports.aclose()
        await self._pins.aclose()

    async def _call(
        self,
        request: httpx2.Request,
        patience: float,
        limit: int,
        target: tuple[str, str] | None = None,
    ) -> EndpointReply:
        async with self._transports.to(_origin(request.url)) as way:
            # Not asyncio's: a transport closes what other calls left idle, and shields that from anyio's ends alone.
            with anyio.fail_after(patience):
                if way.pin is None:
                    return await exchange(way.transport, request, limit)
                try:
                    reply = await way.pin.exchange(way.transport, request, limit)
                except ElsewhereError:
                    self._warn_once(target)
                    raise
                self._elsewhere.discard(target)
                return reply

    def _warn_once(self, target: tuple[str, str] | None) -> None:
        """Log once that an endpoint's name leads elsewhere, until it has answered again."""
        if target is None or target in self._elsewhere:
            return
        if len(self._elsewhere) >= _MANY:
            self._elsewhere.clear()
        self._elsewhere.add(target)
        model, server = target
        _log.warning(
            "endpoint not called: its host name resolves to an address that is not allowed",
            extra={"model": model, "server": server},
        )


def _get(url: str, path: str) -> httpx2.Request:
    try:
        requested = _address(url).copy_with(raw_path=path.encode("ascii"))
    except (httpx2.InvalidURL, UnicodeError):
        raise NotReachedError("its URL is not valid") from None
    return httpx2.Request("GET", requested, headers=_ASKING)


@lru_cache(maxsize=4096)
def _address(url: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        raise NotReachedError("its URL is not valid") from None
    if parsed.scheme not in _SCHEMES or not parsed.host or (parsed.port or 0) > _PORT:
        raise NotReachedError("its URL is not valid")
    return parsed


def _origin(url: httpx2.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _unreachable(error: NotReachedError | NotWholeError) -> EndpointUnreachable:
    return EndpointUnreachable(str(error), sent=isinstance(error, NotWholeError))


def _late(patience: float) -> EndpointUnreachable:
    return EndpointUnreachable(f"no complete response within {patience:g} s", sent=True)
