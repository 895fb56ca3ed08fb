"""An ASGI application that serves a model to dispatchers and to direct callers.

::

    POST, any path      run a job whose payload is the body. A dispatcher (``X-Source: dispatcher``) gets 503 while all
                        slots are in use or direct calls wait; jobs of other callers (direct calls) are queued
    GET /status/{id}    the state of a job: queued, processing, success or failed
    DELETE /status/{id} the same, and the job is cancelled, unless its handler runs in a thread; it has then failed
    GET /health         the number and the ids of the running jobs

The application may be mounted in another application; these paths are then relative to the mount.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_json, check_name, kind_of
from taskqueue_dispatch.gpu_server.jobs import GpuJob, GpuJobPhase, GpuJobs, Handler
from taskqueue_dispatch.gpu_server.push import Pusher

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_BODY_SECONDS = 30.0
_TOKEN = 500
_DIGITS = 6


class _ProblemError(Exception):
    def __init__(self, status: int, detail: str, *, busy: bool = False) -> None:
        super().__init__(detail)
        self.status, self.detail, self.busy = status, detail, busy


class GpuServer:
    """The ASGI application. It runs a job once for each ``Idempotency-Key``.

    The job runs again only if it failed, or if the application no longer keeps it: see ``keep_seconds``.

    A synchronous server answers a dispatcher with the result. With ``asynchronous``, it answers at once; the result is
    polled, and also pushed if ``dispatcher`` is given. A job counts as active until its handler returns.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        max_concurrent: int = 1,
        direct_queue: int = 10,
        asynchronous: bool = False,
        keep_seconds: float = 3600.0,
        keep_count: int = 1000,
        retry_after: float = 1.0,
        body_limit: int = LIMITS.payload,
        dispatcher: str | None = None,
    ) -> None:
        """Create the application without any I/O.

        ``direct_queue`` is the maximum number of waiting direct calls. Ended jobs are kept for ``keep_seconds``, but
        at most ``keep_count`` jobs and 64 MiB of results. ``retry_after`` is sent to refused clients as
        ``Retry-After``. ``dispatcher`` is the URL to push results to, for example ``https://queue.example.com``; it is
        never taken from a request.
        """
        for name, value, least in (
            ("max_concurrent", max_concurrent, 1),
            ("direct_queue", direct_queue, 0),
            ("keep_count", keep_count, 0),
        ):
            if type(value) is not int or value < least:
                raise InvalidInput(name, kind_of(value), f"a whole number of at least {least}")
        self._asynchronous = asynchronous
        self._retry_after = str(max(1, round(retry_after))).encode()
        self._body_limit = body_limit
        self._pusher = None if dispatcher is None else Pusher(dispatcher)
        self.jobs = GpuJobs(
            handler,
            max_concurrent=max_concurrent,
            direct_queue=direct_queue,
            keep_seconds=keep_seconds,
            keep_count=keep_count,
            on_end=self._ended,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            try:
                status, body = await self._answer(scope, receive)
                await respond(send, status, body)
            except _ProblemError as problem:
                encoded = msgspec.json.encode({"detail": problem.detail})
                extra = [(b"retry-after", self._retry_after)] if problem.busy else []
                await respond(send, problem.status, encoded, extra)

    async def aclose(self) -> None:
        """Cancel running jobs and pushes.

        The ASGI lifespan calls this method. If the application is mounted in another application, the outer application
        must call it.
        """
        await self.jobs.aclose()
        if self._pusher is not None:
            await self._pusher.aclose()

    async def _live(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root) if root else scope["path"]
        if scope["method"] == "POST":
            return await self._post(scope, receive)
        cancelling = scope["method"] == "DELETE" and path.startswith("/status/")
        if scope["method"] != "GET" and not cancelling:
            raise _ProblemError(405, "only GET and POST are allowed, and DELETE for /status/{id}")
        if path == "/health":
            active = self.jobs.active
            fields = {"status": "ok", "active_jobs": len(active), "jobs": list(active)}
            return 200, msgspec.json.encode(fields)
        if path.startswith("/status/"):
            job = self.jobs.find(unquote(path.removeprefix("/status/")))
            if job is None:
                raise _ProblemError(404, "job not found")
            if cancelling:
                self.jobs.cancel(job)
            return 200, job.report()
        raise _ProblemError(404, "unknown path")

    async def _post(self, scope: Scope, receive: Receive) -> tuple[int, bytes]:
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        job = _job_of(headers, await self._body(headers, receive))
        known = self.jobs.find(job.id)
        if known is not None and known.digest != job.digest:
            raise _ProblemError(422, "this Idempotency-Key was used with another payload")
        # A failed job runs again, because a client sends a job again to retry it.
        if known is not None and known.phase is not GpuJobPhase.FAILED:
            if not job.direct:
                known.token = job.token or known.token
            job = known
        elif job.direct:
            if self.jobs.full:
                raise _ProblemError(503, "Queue full", busy=True)
            self.jobs.add(job)
        elif self.jobs.busy:
            raise _ProblemError(503, "GPU busy", busy=True)
        else:
            self.jobs.add(job)
        if job.direct and not job.ended.is_set():
            fields = {"status": "queued", "job_id": job.id, "position": self.jobs.position(job)}
            return 200, msgspec.json.encode(fields)
        if not self._asynchronous:
            await job.ended.wait()
        failed = job.phase is GpuJobPhase.FAILED
        return (422 if job.refused else 500) if failed else 200, job.report()

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        too_long = _ProblemError(413, f"the payload is longer than {self._body_limit} bytes")
        text = headers.get("content-length", "0")
        if text.isascii() and text.isdigit() and int(text[:20]) > self._body_limit:
            raise too_long
        body, more = b"", True
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while more:
                    message = await receive()
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._body_limit:
                        raise too_long
        except TimeoutError:
            raise _ProblemError(408, "the body did not arrive in time") from None
        return body

    def _ended(self, job: GpuJob) -> None:
        if self._pusher is not None and self._asynchronous and job.token is not None:
            self._pusher.push(job.id, job.token, job.report())


async def respond(
    send: Send, status: int, body: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a response with JSON text."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(extra or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _job_of(headers: dict[str, str], body: bytes) -> GpuJob:
    direct = headers.get("x-source", "").strip().casefold() != "dispatcher"
    job_id = headers.get("idempotency-key") or headers.get("x-job-id") or secrets.token_hex(16)
    text = headers.get("x-attempt", "1")
    try:
        check_name("Idempotency-Key", job_id)
        check_json("body", body, "body")
        payload = msgspec.json.decode(body)
    except InvalidInput as error:
        raise _ProblemError(400, str(error)) from None
    except (ValueError, RecursionError):
        raise _ProblemError(400, "the body contains a number that is out of range") from None
    attempt = int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else 1
    job = GpuJob(job_id, payload, attempt=attempt, direct=direct)
    job.switched = headers.get("x-model-switched", "").strip().casefold() == "true"
    token = headers.get("x-lease-token", "")
    job.token = token if 0 < len(token) <= _TOKEN else None
    job.digest = hashlib.sha256(body).digest()
    return job
