"""The server itself: health, readiness, workers, housekeeping, and the description of this API."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from taskqueue_core.capabilities import Maintained
from taskqueue_core.tasks import Health
from taskqueue_server.api.models import AliveOut, HealthOut, ReadyOut, WorkersOut
from taskqueue_server.auth.credentials import peer_of, token_of
from taskqueue_server.context.server import VERSION, ServerContext
from taskqueue_server.routing.operations import Operation, RequestContext, Scope, answer
from taskqueue_server.routing.parameters import AFTER, LIMIT, link, page_of

_HEALTH_SECONDS = 5.0
_UNREADY = {"retry-after": "1"}


async def health(call: RequestContext) -> Response:
    """Say whether the store can serve. Its details are for those who show a token, where tokens are asked for."""
    context, request = call.context, call.request
    told = await _health(context)
    known = context.identify(token_of(request), peer_of(request)) is not None
    details = told.details if known else {}
    body = HealthOut(ok=told.ok, backend=told.backend, version=VERSION, details=details)
    return answer(body, 200 if told.ok else 503)


async def alive(_: RequestContext) -> Response:
    """Say that this process runs and answers, whatever becomes of its store: a restart would not bring that back."""
    return answer(AliveOut(version=VERSION))


async def ready(call: RequestContext) -> Response:
    """Say whether this server takes work now: not while it starts or drains, nor while its store is away."""
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
    """Return the workers with an open subscription, on any replica, by id, page by page.

    Those are left out that work on a queue that the token is not for.
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
    """Do one pass of housekeeping. The server does so by itself; this is for those who cannot wait."""
    return answer(await call.context.control.maintain())


OPERATIONS = (
    Operation(
        id="system_health",
        method="GET",
        path="/health",
        handler=health,
        answers={200: HealthOut, 503: HealthOut},
    ),
    Operation(
        id="system_alive", method="GET", path="/alive", handler=alive, answers={200: AliveOut}
    ),
    Operation(
        id="system_ready",
        method="GET",
        path="/ready",
        handler=ready,
        answers={200: ReadyOut, 503: ReadyOut},
    ),
    Operation(
        id="system_workers",
        method="GET",
        path="/v1/workers",
        handler=workers,
        verb="admin",
        scope=Scope.HANDLER,
        query=(LIMIT, AFTER),
        answers={200: WorkersOut},
        problems=(503,),
        tag="workers",
        tells=("Link",),
    ),
    Operation(
        id="system_maintain",
        method="POST",
        path="/v1/maintain",
        handler=maintain,
        verb="admin",
        scope=Scope.SERVER,
        answers={200: Maintained},
        problems=(503,),
    ),
)
