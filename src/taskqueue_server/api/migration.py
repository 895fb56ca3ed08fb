"""Limits of this server, and the migration from one backend to another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.responses import Response

from taskqueue_core.backend import Capability
from taskqueue_core.limits import LIMITS, Limits
from taskqueue_core.migration import (
    MigratingBackend,
    MigrationPhase,
    MigrationStatus,
    QueueOnTheMove,
    finish,
    rollback,
    start,
    status,
)
from taskqueue_core.migration.steps import MigrationUnfinished
from taskqueue_server.auth.access import OBSERVING
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer


class LimitsOut(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of this server, in bytes, characters or counts, and the capabilities of its backend."""

    limits: Limits
    capabilities: list[Capability]


class MigrationOut(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of the migration between two backends."""

    phase: MigrationPhase
    leaves: str
    """the backend that is being drained, ``old`` or ``new``"""
    remembered: float
    """seconds for which the drained backend must still detect duplicate ids after it is empty"""
    queues: list[QueueOnTheMove]
    unfinished: list[str]
    """queues that still have tasks in the drained backend"""
    uncarried: bool
    """whether the drained backend has lines about ended tasks for which others wait"""


async def limits(call: RequestContext) -> Response:
    """Return the limits of this server and the capabilities of its backend."""
    names = sorted(call.context.backend.capabilities.names)
    return answer(LimitsOut(limits=LIMITS, capabilities=names))


async def get_migration(call: RequestContext) -> Response:
    """Return the progress of the migration, by queue. 404 if this server has only one backend."""
    return await _act(call, status)


async def begin(call: RequestContext) -> Response:
    """Start the migration: for each queue, copy the settings and move the intake to the new backend. Idempotent."""
    return await _act(call, start, "start migration")


async def end(call: RequestContext) -> Response:
    """Finish the migration if the drained backend has no tasks, or with ``force``. Idempotent.

    409 if the start or the rollback is incomplete, or, without ``force``, if the drained backend still has tasks.
    """
    force = _force(call)
    return await _act(call, lambda backend: finish(backend, force=force), "finish migration")


async def back(call: RequestContext) -> Response:
    """Roll back: queue by queue, close the new backend's intake and open the old one's again. Idempotent.

    Use ``force`` only if the new backend cannot be restored: the server then does not call it, and its tasks are lost.
    """
    force = _force(call)
    return await _act(call, lambda backend: rollback(backend, force=force), "roll back migration")


def _force(call: RequestContext) -> bool:
    if (force := call.flag("force")) or "confirm" in call.request.query_params:
        call.confirm("force")
    return force


async def _act(
    call: RequestContext,
    step: Callable[[MigratingBackend], Awaitable[MigrationStatus]],
    action: str | None = None,
) -> Response:
    backend = call.context.backend.inner
    if not isinstance(backend, MigratingBackend):
        raise ProblemError(404, "not_migrating", "no migration: this server has only one backend")
    try:
        done = await step(backend)
    except MigrationUnfinished as error:
        raise ProblemError(409, error.code, str(error)) from None
    if action is not None:
        call.note(action)
    return answer(msgspec.convert(done, MigrationOut, from_attributes=True))


_FORCE = (
    Query("force", {"type": "boolean", "default": False}, "proceed even if tasks are left behind"),
    Query("confirm", {"const": "force"}, "must be `force` if `force` is true"),
)
_operation = partial(Operation, tag="migration", verb="admin")
OPERATIONS = (
    Operation("GET", "/v1/limits", limits, {200: LimitsOut}, id="migration_limits", tag="server"),
    _operation(
        "GET",
        "/v1/migration",
        get_migration,
        {200: MigrationOut},
        id="migration_look",
        verb=OBSERVING,
        scope=Scope.SERVER,
        problems=(404,),
    ),
    *(
        _operation(
            "POST",
            f"/v1/migration/{name}",
            handler,
            {200: MigrationOut},
            id=f"migration_{called}",
            scope=Scope.SERVER,
            query=query,
            problems=(404, 409),
        )
        for name, called, handler, query in (
            ("start", "begin", begin, ()),
            ("finish", "end", end, _FORCE),
            ("rollback", "back", back, _FORCE),
        )
    ),
)
