"""The caller: every request to a server of an endpoint goes out here, and its answer is read within bounds."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import h11
import httpx2

from taskqueue_core.capabilities import Endpoint, Seen, SlotLease
from taskqueue_core.tasks import Task
from taskqueue_core.trust import trusting
from taskqueue_dispatch.calling.answers import Answer, Failed, Unreachable
from taskqueue_dispatch.calling.lines import (
    Lines,
    NotReachedError,
    NotUsableError,
    NotWholeError,
    Place,
)
from taskqueue_dispatch.calling.reading import Reply, read, read_seen, read_status
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.models import ModelConfig, ModelType

__all__ = ["Caller"]

_ASK = 10.0
_HEALTH = 5.0
_TAKE = 60.0
"""seconds for a server to take the job of an async model"""
_HEALTH_LIMIT = 1024 * 1024
_PORTS = {"http": 80, "https": 443}
_ASKING = (
    ("accept", "application/json"),
    ("accept-encoding", "identity"),
    ("user-agent", "taskqueue-dispatch"),
)
_Headers = Sequence[tuple[str, str]]
_SENDING = (*_ASKING, ("content-type", "application/json"), ("x-source", "dispatcher"))


class Caller:
    """Calls servers, over connections that it keeps. One event loop; any number of calls at once.

    No redirect is followed, no proxy, cookie or credential of the environment used, and certificates are verified.
    Whatever a server does, a call ends in time and reads no more than it may; none raises for it.
    """

    def __init__(self, settings: DispatchSettings, *, tls_ca: Path | str | None = None) -> None:
        """Do no input or output but to read ``tls_ca``, authorities (PEM) to trust instead of the system's."""
        trust = trusting(tls_ca)
        self._limit = settings.answer_limit
        self._health = min(_HEALTH, settings.health_interval)
        self._lines = Lines(ssl.create_default_context if trust is None else lambda: trust)

    async def send(
        self, lease: SlotLease, task: Task, config: ModelConfig, *, attempt: int
    ) -> Answer:
        """POST a job to the server of a lease, and return what it says.

        The server gets the task's payload as it is, its id as ``X-Job-Id`` and ``Idempotency-Key``, the attempt, and
        the lease's token to push the result with: never where the client wants to have it. A sync model has
        `max_poll_time` to answer, after which the job has failed; an async one is to take it within a minute.
        """
        headers = (
            *_SENDING,
            ("idempotency-key", task.id),
            ("x-job-id", task.id),
            ("x-attempt", str(attempt)),
            ("x-lease-token", lease.token),
        )
        sync = config.model_type is ModelType.SYNC
        patience = config.max_poll_time if sync else min(_TAKE, config.max_poll_time)
        try:
            where, target = _address(lease.url)
            request = _post(where, target, headers, len(task.payload))
            reply = await self._call(where, request, task.payload, patience, self._limit)
        except NotUsableError as error:
            return Failed(str(error))
        except TimeoutError:
            if sync:
                return Failed(f"no whole answer within the max_poll_time of {patience:g} s")
            return _late(patience)
        except (NotReachedError, NotWholeError) as error:
            return _unreachable(error)
        return read(reply, task.id, config)

    async def ask(self, url: str, job_id: str, config: ModelConfig) -> Answer:
        """Ask the server of an endpoint's URL for a job, by the id that it has there.

        `Unreachable` where the model has no ``poll_endpoint_template``: nobody can be asked then.
        """
        template = config.poll_endpoint_template
        if template is None:
            return Unreachable("the model has no poll_endpoint_template", sent=False)
        path = template.replace("{id}", quote(job_id, safe=""))
        try:
            where, _ = _address(url)
            reply = await self._call(where, _get(where, path), b"", _ASK, self._limit)
        except NotUsableError as error:
            return Failed(str(error))
        except TimeoutError:
            return _late(_ASK)
        except (NotReachedError, NotWholeError) as error:
            return _unreachable(error)
        return read_status(reply, job_id, config)

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:
        """Ask an endpoint's server how it is; ``None`` where it does not answer as one that is well."""
        try:
            where, _ = _address(endpoint.url)
            request = _get(where, config.health_path)
            reply = await self._call(where, request, b"", self._health, _HEALTH_LIMIT)
        except (NotUsableError, NotReachedError, NotWholeError, TimeoutError):
            return None
        return read_seen(reply)

    async def aclose(self) -> None:
        """Close every connection that no call uses. Idempotent; a later call opens new ones."""
        self._lines.close()
        await asyncio.sleep(0)  # their ends are turns of the loop

    async def _call(
        self, where: Place, request: h11.Request, content: bytes, patience: float, limit: int
    ) -> Reply:
        async with asyncio.timeout(patience):
            return await self._lines.call(where, request, content, limit)


def _post(where: Place, target: str, headers: _Headers, size: int) -> h11.Request:
    told = (("host", where.authority), *headers, ("content-length", str(size)))
    return _request("POST", target, told)


def _get(where: Place, target: str) -> h11.Request:
    return _request("GET", target, (("host", where.authority), *_ASKING))


def _request(method: str, target: str, headers: _Headers) -> h11.Request:
    try:
        return h11.Request(method=method, target=target, headers=list(headers))
    except (h11.ProtocolError, UnicodeError):
        raise NotReachedError("no request can be made of its address") from None


@lru_cache(maxsize=4096)
def _address(url: str) -> tuple[Place, str]:
    """Return where a server is, and what of its address the server itself is told."""
    try:
        parsed = httpx2.URL(url)
        port = _PORTS[parsed.scheme] if parsed.port is None else parsed.port
    except (httpx2.InvalidURL, KeyError, ValueError):
        raise NotReachedError("its address is none") from None
    place = Place(
        parsed.raw_host.decode("ascii"),
        port,
        parsed.scheme == "https",
        parsed.netloc.decode("ascii"),
    )
    return place, parsed.raw_path.decode("ascii")


def _unreachable(error: NotReachedError | NotWholeError) -> Unreachable:
    return Unreachable(str(error), sent=isinstance(error, NotWholeError))


def _late(patience: float) -> Unreachable:
    return Unreachable(f"no whole answer within {patience:g} s", sent=True)
