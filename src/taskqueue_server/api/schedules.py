"""Schedules: list, put, pause, resume, run and delete."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue_schedules import QueueSchedules
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import CATCH_UP
from taskqueue_server.api.models import ConfirmationOut
from taskqueue_server.api.schedule_models import (
    Deleted,
    InstantsOut,
    RunIn,
    RunOut,
    ScheduleIn,
    ScheduleOut,
    SchedulesOut,
)
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer
from taskqueue_server.routing.parameters import AFTER, LIMIT, link, page_query

_VERSIONS = 999_999_999
_COUNT = 5
_USING = ("publish", "consume", "admin")
"""the rights of which one permits to see the payloads of a queue's schedules"""
_PAGE_BYTES = LIMITS.body // 2
"""maximum number of bytes of the payloads on a page"""


def _schedules(call: RequestContext) -> QueueSchedules:
    return call.context.queue.schedules


async def known(call: RequestContext) -> ScheduleStatus:
    """Return the schedule in the path. Raises `ProblemError` if there is none, or the client lacks the right."""
    found = await _schedules(call).get(call.name("name"))
    if found is None:
        raise ProblemError(404, "unknown_schedule", "there is no schedule with this name")
    call.demand(found.key)
    return found


async def schedules(call: RequestContext) -> Response:
    """List the schedules of the queues that the token permits, sorted by name.

    Repeat the request with ``next`` as ``after`` until the response has no ``next``. A page may have fewer schedules
    than ``limit``, if they are large. The header ``Link`` has the URL of the next page. For a token that only permits
    to observe a queue, the payloads of its tasks are null.
    """
    limit, after = page_query(call)
    found, following = await visible(call, after, limit)
    out = [_described(call, status) for status in found]
    return answer(SchedulesOut(schedules=out, next=following), headers=link(call, following))


def _described(call: RequestContext, status: ScheduleStatus) -> ScheduleOut:
    return ScheduleOut.of(status, payload=call.is_allowed(status.key, _USING))


async def visible(
    call: RequestContext, after: str | None, limit: int
) -> tuple[list[ScheduleStatus], str | None]:
    """Return a page of the schedules that the client may see, and its last name if more of them follow."""
    found: list[ScheduleStatus] = []
    size = 0
    while page := await _schedules(call).list(after=after, limit=LIMITS.batch):
        for status in filter(lambda status: call.is_allowed(status.key), page):
            size += 0 if status.schedule is None else len(bytes(status.schedule.task.payload))
            if len(found) == limit or (found and size > _PAGE_BYTES):
                return found, found[-1].name
            found.append(status)
        after = page[-1].name
    return found, None


async def schedule(call: RequestContext) -> Response:
    """Return one schedule with its next and its last instants.

    For a token that only permits to observe the queue, the payload of the task is null.
    """
    return answer(_described(call, await known(call)))


async def put(call: RequestContext) -> Response:
    """Create a schedule, or replace the one with this name. A pause stays in force.

    The token must permit publishing to the queue of the task. With ``version``, the response is 409 if another version
    is current; 0 means that there must be no such schedule. A schedule cannot move to another queue: delete it first.
    """
    name = call.name("name")
    body = await call.body(ScheduleIn)
    call.demand(body.schedule.call.key)
    found = await _schedules(call).get(name)
    if found is not None:
        call.demand(found.key)
    status = await _schedules(call).put(
        body.schedule.to_schedule(name), version=body.version, declared_by=body.declared_by
    )
    call.note("put schedule", status.key, details=f"schedule={name}")
    return answer(ScheduleOut.of(status))


async def delete(call: RequestContext) -> Response:
    """Delete a schedule. Tasks that it has published stay. Idempotent: ``deleted`` is false if there was none.

    With ``version``, the response is 409 if another version is current.
    """
    name, version = call.name("name"), None
    if "version" in call.request.query_params:
        version = call.number("version", None, _VERSIONS)
    found = await _schedules(call).get(name)
    if found is None:
        return answer(Deleted(deleted=False))
    call.demand(found.key)
    deleted = await _schedules(call).delete(name, version=version)
    call.note("delete schedule", found.key, details=f"schedule={name}")
    return answer(Deleted(deleted=deleted))


async def pause(call: RequestContext) -> Response:
    """Let a schedule publish no more tasks, until it is resumed. Idempotent."""
    found = await _schedules(call).pause((await known(call)).name)
    call.note("pause schedule", found.key, details=f"schedule={found.name}")
    return answer(ScheduleOut.of(found))


async def resume(call: RequestContext) -> Response:
    """Let a paused schedule continue with its first instant after now. Idempotent."""
    found = await _schedules(call).resume((await known(call)).name)
    call.note("resume schedule", found.key, details=f"schedule={found.name}")
    return answer(ScheduleOut.of(found))


async def instants(call: RequestContext) -> Response:
    """Return the instants that come next, in Unix seconds; of a paused schedule, as if it were not paused."""
    count = call.number("count", _COUNT, CATCH_UP)
    return answer(InstantsOut(await _schedules(call).next((await known(call)).name, count)))


async def run(call: RequestContext) -> Response:
    """Publish the task of a schedule now, or with ``since`` and ``until`` the tasks of all instants between them.

    The task of an instant that was published before is a ``duplicate``, as long as its id is remembered. The first
    confirmation that is ``refused`` is the last one: repeat the request later.
    """
    found = await known(call)
    name = found.name
    body = await call.body(RunIn)
    if (body.since is None) != (body.until is None):
        missing = "until" if body.until is None else "since"
        raise InvalidInput(missing, "nothing", "since and until, or neither")
    overlap = body.overlap
    if overlap is None and body.since is not None:
        overlap = "allow"
    confirmations = await _schedules(call).run(name, body.since, body.until, overlap)
    stored = sum(each.stored for each in confirmations)
    call.note("run schedule", found.key, tasks=stored, details=f"schedule={name}")
    return answer(RunOut([ConfirmationOut.of(each) for each in confirmations]))


_NAME = "/v1/schedules/{name}"
_VERSION = Query(
    "version",
    {"type": "integer", "minimum": 1, "maximum": _VERSIONS},
    "the version of the schedule to delete",
    example=3,
)
_NUMBER = Query(
    "count",
    {"type": "integer", "minimum": 1, "maximum": CATCH_UP, "default": _COUNT},
    "maximum number of instants",
)
_EXAMPLE = {
    "schedule": {
        "when": {"type": "cron", "expression": "0 9 * * MON-FRI", "timezone": "Europe/Berlin"},
        "call": {"key": "emails", "payload": {"to": "a@example.org"}},
    }
}
_operation = partial(
    Operation, tag="schedules", verb=("publish", "admin"), scope=Scope.HANDLER, problems=(404,)
)
_reading = partial(_operation, "GET", verb=("observe", *_USING))
OPERATIONS = (
    _reading(
        "/v1/schedules",
        schedules,
        {200: SchedulesOut},
        id="schedules_list",
        query=(LIMIT, AFTER),
        problems=(),
        response_headers=("Link",),
    ),
    _reading(_NAME, schedule, {200: ScheduleOut}, id="schedules_get"),
    _operation(
        "PUT",
        _NAME,
        put,
        {200: ScheduleOut},
        id="schedules_put",
        verb="publish",
        body=ScheduleIn,
        problems=(409,),
        example=_EXAMPLE,
    ),
    _operation(
        "DELETE",
        _NAME,
        delete,
        {200: Deleted},
        id="schedules_delete",
        query=(_VERSION,),
        problems=(409,),
    ),
    _operation("POST", f"{_NAME}/pause", pause, {200: ScheduleOut}, id="schedules_pause"),
    _operation("POST", f"{_NAME}/resume", resume, {200: ScheduleOut}, id="schedules_resume"),
    _reading(f"{_NAME}/next", instants, {200: InstantsOut}, id="schedules_next", query=(_NUMBER,)),
    _operation(
        "POST",
        f"{_NAME}/run",
        run,
        {200: RunOut},
        id="schedules_run",
        body=RunIn,
        problems=(404, 409),
        example={},
    ),
)
