"""The server itself: health, readiness, workers and maintenance."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response

from taskqueue_core.capabilities import Maintained
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Health
from taskqueue_server.api.models import AliveOut, HealthOut, ReadyOut, WorkersOut
from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.context.server import VERSION, ServerContext
from taskqueue_server.routing.operations import Operation, RequestContext, Scope, answer
from taskqueue_server.routing.parameters import AFTER, LIMIT, link, page_of

_HEALTH_SECONDS = 5.0
_UNREADY = {"retry-after": "1"}


async def health(call: RequestContext) -> Response:
    """Return whether the store works. Details require a valid token on a server with authentication."""
    context, request = call.context, call.request
    store = await _health(context)
    with contextlib.suppress(BackendUnavailable):
        await context.access.open_session(request)
    known = context.access.authenticate(request) is not None
    details = store.details if known else {}
    body = HealthOut(ok=store.ok, backend=store.backend, version=VERSION, details=details)
    return answer(body, 200 if store.ok else 503)


async def alive(_: RequestContext) -> Response:
    """Confirm that this process runs. The store is not checked, because restarting the process would not repair it."""
    return answer(AliveOut(version=VERSION))


async def ready(call: RequestContext) -> Response:
    """Return whether this server accepts work: it has started, is not draining, and its settings and store work."""
    context = call.context
    if not context.started:
        reason = "starting"
    elif context.draining.is_set():
        reason = "draining"
    elif context.backend.fault is not None:
        reason = "configuration"
    elif not (await _health(context)).ok:
        reason = "store"
    else:
        return answer(ReadyOut(ready=True, reason="ok"))
    return answer(ReadyOut(ready=False, reason=reason), 503, _UNREADY)


async def _health(context: ServerContext) -> Health:
    try:
        async with asyncio.timeout(_HEALTH_SECONDS):
            return await context.backend.health()
    except TimeoutError:
        return Health(ok=False, backend="silent")


async def workers(call: RequestContext) -> Response:
    """List the workers with an open subscription, on any replica, sorted by id.

    Workers that subscribe to a queue that the token does not permit are omitted.
    """
    matches = {
        worker.worker_id: worker
        for worker in await call.context.control.workers()
        if all(map(call.is_allowed, worker.keys))
    }
    names, following = page_of(call, sorted(matches))
    body = WorkersOut(workers=[matches[name] for name in names], next=following)
    return answer(body, headers=link(call, following))


async def maintain(call: RequestContext) -> Response:
    """Run maintenance now. The server also runs it periodically."""
    return answer(await call.context.control.maintain())


OPERATIONS = (
    Operation("GET", "/health", health, {200: HealthOut, 503: HealthOut}, id="system_health"),
    Operation("GET", "/alive", alive, {200: AliveOut}, id="system_alive"),
    Operation("GET", "/ready", ready, {200: ReadyOut, 503: ReadyOut}, id="system_ready"),
    Operation(
        "GET",
        "/v1/workers",
        workers,
        {200: WorkersOut},
        id="system_workers",
        verb=OBSERVING,
        scope=Scope.HANDLER,
        query=(LIMIT, AFTER),
        tag="workers",
        response_headers=("Link",),
    ),
    Operation(
        "POST",
        "/v1/maintain",
        maintain,
        {200: Maintained},
        id="system_maintain",
        verb="admin",
        scope=Scope.SERVER,
    ),
)
