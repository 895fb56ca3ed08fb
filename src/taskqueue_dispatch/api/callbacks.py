"""HTTP operations for results that GPU servers push, and for the results that were pushed too late."""

from __future__ import annotations

import re
from collections.abc import Iterator

from starlette.responses import Response

from taskqueue_core.capabilities import Left
from taskqueue_core.limits import LIMITS, check_json
from taskqueue_dispatch.api.models import LateOut, PushedIn, TakenOut
from taskqueue_dispatch.handler_helpers import dispatcher_of, job_of, operation, unknown_job
from taskqueue_dispatch.job_notes import lease_token_of
from taskqueue_dispatch.status import mark_of_queue
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing import bodies
from taskqueue_server.routing.operations import Query, RequestContext, answer, spliced

_HEADER = "X-Lease-Token"
_LONGEST = 200
_TOKEN = re.compile(rf"[!-~]{{1,{_LONGEST}}}")
_LEASE_TOKEN = Query(
    _HEADER,
    {"type": "string", "minLength": 1, "maxLength": _LONGEST, "pattern": "^[!-~]+$"},
    "the token that the server received with the job",
    required=True,
    example="k3f.17.b00c",
)


async def push(call: RequestContext) -> Response:
    """Report how a job ended, so that the dispatcher need not poll. The token sent with the job is the only credential.

    A token that was not sent with this job is refused with 401, and the body is not read. The answer is 409 if the
    token is no longer valid. In this case, the slot was released, for example after a result, or assigned again. The
    report is then ignored, but kept for an hour.
    """
    token = _token(call)
    dispatcher, known = dispatcher_of(call), await job_of(call)
    model, job_id = dispatcher.jobs.model_of(known.key), known.task_id
    if model is None:
        raise unknown_job()
    call.trust()
    note = await call.read(limit=LIMITS.result, name="result")
    bodies.decode(PushedIn, note)
    check_json("body", note, "result")
    if await dispatcher.pool.leave(model, job_id, token, note) is Left.LATE:
        raise ProblemError(
            409,
            "late",
            "the result was ignored: the token is no longer valid, because the slot was released or assigned again",
        )
    return answer(TakenOut())


def _token(call: RequestContext) -> str:
    """Return the token of the job's slot. Raises `ProblemError` (401) unless a dispatcher has sent it with this job."""
    results = call.request.headers.getlist(_HEADER)
    token = None
    if len(results) == 1 and _TOKEN.fullmatch(results[0]):
        secrets = dispatcher_of(call).registry.secrets
        token = lease_token_of(secrets, call.name("job_id"), results[0])
    if token is None:
        raise ProblemError(
            401,
            "unauthenticated",
            f"send the token that came with this job in exactly one {_HEADER} header",
            headers={"www-authenticate": "Lease"},
        )
    return token


async def late(call: RequestContext) -> Response:
    """Return a job's reports that arrived too late and were ignored: the last 8 of the last hour, oldest first."""
    job_id, dispatcher = call.name("job_id"), dispatcher_of(call)
    mark = job_id.partition("-")[0]
    # Do not read the job's own record here, because it may have expired.
    for key in filter(call.is_allowed, await dispatcher.jobs.queues()):
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
    operation(
        "callbacks",
        "POST",
        "/tasks/callback/{job_id}",
        push,
        tag="jobs",
        headers=(_LEASE_TOKEN,),
        body=PushedIn,
        example={"status": "success", "result": {"url": "https://files.example.com/1.png"}},
        answers={200: TakenOut},
        problems=(401, 404, 409, 503),
    ),
    operation(
        "callbacks",
        "GET",
        "/admin/late/{job_id}",
        late,
        verb="admin",
        tag="failed jobs",
        answers={200: LateOut},
        problems=(404, 503),
    ),
)
