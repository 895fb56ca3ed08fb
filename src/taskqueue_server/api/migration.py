"""What this server allows, and how far it is on its way from one backend to another."""

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
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer


class LimitsOut(msgspec.Struct, frozen=True, kw_only=True):
    """What is too much for this server, in bytes or in number, and what its backend can do."""

    limits: Limits
    capabilities: list[Capability]


class MigrationOut(msgspec.Struct, frozen=True, kw_only=True):
    """How far the migration between two backends is."""

    phase: MigrationPhase
    leaves: str
    """the side that is left"""
    remembered: float
    """seconds for which the side that is left may still be needed to tell an id that it knows, once it is empty"""
    queues: list[QueueOnTheMove]
    unfinished: list[str]
    """queues of which something is left"""

    @classmethod
    def of(cls, status: MigrationStatus) -> MigrationOut:
        """Name what is unfinished."""
        return cls(
            phase=status.phase,
            leaves=status.leaves,
            remembered=status.remembered,
            queues=list(status.queues),
            unfinished=list(status.unfinished),
        )


async def limits(call: RequestContext) -> Response:
    """Return the limits on what comes from outside, and what the backend can do."""
    names = sorted(call.context.backend.capabilities.names)
    return answer(LimitsOut(limits=LIMITS, capabilities=names))


async def get_migration(call: RequestContext) -> Response:
    """Say how far the migration is, and what is left where. 404 where this server serves one backend only."""
    return await _act(call, status)


async def begin(call: RequestContext) -> Response:
    """Close the old side's intake, queue by queue, and have the new side take in. Settings are copied. Idempotent."""
    return await _act(call, start)


async def end(call: RequestContext) -> Response:
    """Note that nothing is left behind. 409 while there is, unless it is forced. Idempotent."""
    force = _force(call)
    return await _act(call, lambda backend: finish(backend, force=force))


async def back(call: RequestContext) -> Response:
    """Close the new side's intake, queue by queue, and have the old side take in again. Idempotent.

    With ``force`` only the old side is opened: the new one is lost.
    """
    force = _force(call)
    return await _act(call, lambda backend: rollback(backend, force=force))


def _force(call: RequestContext) -> bool:
    if (force := call.flag("force")) or "confirm" in call.request.query_params:
        call.confirm("force")
    return force


async def _act(
    call: RequestContext, step: Callable[[MigratingBackend], Awaitable[MigrationStatus]]
) -> Response:
    backend = call.context.backend.inner
    if not isinstance(backend, MigratingBackend):
        raise ProblemError(404, "not_migrating", "no migration: this server has one backend only")
    try:
        return answer(MigrationOut.of(await step(backend)))
    except MigrationUnfinished as error:
        raise ProblemError(409, error.code, str(error)) from None


_FORCE = (
    Query("force", {"type": "boolean", "default": False}, "though something is left behind"),
    Query("confirm", {"const": "force"}, "`force`, where it is forced"),
)
_operation = partial(Operation, tag="migration", verb="admin")
OPERATIONS = (
    Operation(
        id="migration_limits",
        method="GET",
        path="/v1/limits",
        handler=limits,
        answers={200: LimitsOut},
        tag="server",
    ),
    _operation(
        id="migration_look",
        method="GET",
        path="/v1/migration",
        handler=get_migration,
        scope=Scope.SERVER,
        answers={200: MigrationOut},
        problems=(404,),
    ),
    *(
        _operation(
            id=f"migration_{called}",
            method="POST",
            path=f"/v1/migration/{name}",
            handler=handler,
            scope=Scope.SERVER,
            query=query,
            answers={200: MigrationOut},
            problems=(404, 409),
        )
        for name, called, handler, query in (
            ("start", "begin", begin, ()),
            ("finish", "end", end, _FORCE),
            ("rollback", "back", back, _FORCE),
        )
    ),
)
