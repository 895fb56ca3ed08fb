"""What servers push: how a job ended, from whoever has the token of its slot."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.responses import Response

from taskqueue_core.capabilities import Left
from taskqueue_core.limits import LIMITS, check_json
from taskqueue_dispatch.api.handler_helpers import dispatcher_of, job_of, unknown_job
from taskqueue_dispatch.api.models import LateOut, PushedIn, TakenOut
from taskqueue_dispatch.status import mark_of_queue
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing import bodies
from taskqueue_server.routing.operations import (
    Operation,
    Query,
    RequestContext,
    Scope,
    answer,
    spliced,
)

_HEADER = "X-Lease-Token"
_LONGEST = 200
_LEASE_TOKEN = Query(
    _HEADER,
    {"type": "string", "minLength": 1, "maxLength": _LONGEST, "pattern": "^[!-~]+$"},
    "what the server was given with the job",
    required=True,
    example="k3f.17.b00c",
)


async def push(call: RequestContext) -> Response:
    """Tell how a job ended, instead of being asked for it. The token that came with the job is all that is needed.

    409: the job's slot is another's by now, or its result was there before. What came is kept for an hour, and changes
    nothing.
    """
    token = _token(call)
    dispatcher, known = dispatcher_of(call), await job_of(call)
    model, job_id = dispatcher.jobs.model_of(known.key), known.task_id
    if model is None:
        raise unknown_job()
    note = await call.read(limit=LIMITS.result)
    bodies.decode(PushedIn, note)
    check_json("body", note, LIMITS.result)
    if await dispatcher.pool.leave(model, job_id, token, note) is Left.LATE:
        raise ProblemError(409, "late", "the slot of this job is another's: it was put aside")
    return answer(TakenOut())


def _token(call: RequestContext) -> str:
    results = call.request.headers.getlist(_HEADER)
    if (
        len(results) != 1
        or not 0 < len(results[0]) <= _LONGEST
        or not results[0].isascii()
        or not results[0].isprintable()
        or " " in results[0]
    ):
        raise ProblemError(
            401,
            "unauthenticated",
            f"send the token of the job's slot once, in {_HEADER}",
            headers={"www-authenticate": "Lease"},
        )
    return results[0]


async def late(call: RequestContext) -> Response:
    """Return what was pushed for a job too late, and changed nothing: the last 8, for an hour, oldest first."""
    job_id, dispatcher = call.name("job_id"), dispatcher_of(call)
    mark = job_id.partition("-")[0]
    for key in filter(
        call.is_allowed, await dispatcher.jobs.queues()
    ):  # the job may be forgotten by now
        model = dispatcher.jobs.model_of(key)
        if model is not None and mark_of_queue(key) == mark:
            return spliced(_notes(await dispatcher.pool.late(model, job_id)))
    raise unknown_job()


def _notes(notes: tuple[bytes, ...]) -> Iterator[bytes]:
    yield b'{"notes":['
    for index, note in enumerate(notes):
        yield b"," + note if index else note
    yield b"]}"


OPERATIONS = (
    Operation(
        id="callbacks_push",
        method="POST",
        path="/tasks/callback/{job_id}",
        handler=push,
        tag="jobs",
        strict=True,
        headers=(_LEASE_TOKEN,),
        body=PushedIn,
        example={"status": "success", "result": {"url": "https://files.example.com/1.png"}},
        answers={200: TakenOut},
        problems=(401, 404, 409, 503),
    ),
    Operation(
        id="callbacks_late",
        method="GET",
        path="/admin/late/{job_id}",
        handler=late,
        verb="admin",
        tag="failed jobs",
        scope=Scope.HANDLER,
        strict=True,
        answers={200: LateOut},
        problems=(404, 503),
    ),
)
