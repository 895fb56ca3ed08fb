"""HTTP operations that submit, read, wait for and cancel jobs."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.responses import Response

from taskqueue_core.errors import IdConflict, InvalidInput
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_dispatch.api.models import HandleIn, JobOut, LeasedOut, QueuedOut, SubmissionIn
from taskqueue_dispatch.callbacks.records import record_of
from taskqueue_dispatch.handler_helpers import dispatcher_of, job_of, operation, unknown_job
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.status import JobState
from taskqueue_dispatch.submit import Leased, NoSlots, Queued
from taskqueue_server.api.models import Cancelled
from taskqueue_server.api.tasks import WAIT, seconds, waited
from taskqueue_server.problems import ProblemError, retry_after
from taskqueue_server.routing.bodies import JSON
from taskqueue_server.routing.operations import RequestContext, answer
from taskqueue_server.routing.parameters import IDEMPOTENCY_KEY, id_maker, reused

_BODY = LIMITS.payload + 16 * 1024
"""maximum size of a body in bytes: the largest payload, and space for the other fields"""
_LIVE = {JobState.QUEUED, JobState.RUNNING}


async def submit(call: RequestContext) -> Response:
    """Submit a job. If the answer is 202, the job is stored, and will end as done, failed, expired or cancelled.

    The outcome ``leased`` means that the job need not wait: a slot is free for it, or it has already started or ended.
    ``queued`` means that it waits. If the answer is 503 with a ``reason``, the job was not stored, for example because
    the model has no slots (``no_endpoints``) or its queue is full: try again after ``Retry-After`` seconds.

    A request may be repeated with the same ``idempotency_key``, or the same header ``Idempotency-Key``; the answer is
    then the current outcome of the job. The same key with a different payload is refused: with 409, or with 422 if the
    key is in the header. If there is no answer, or if its status is 502, 503 or 504, repeat the request with the same
    key.
    """
    body = await call.body(SubmissionIn, _BODY, "payload")
    key = queue_of(body.model)
    call.demand(key)
    header = id_maker(call)(key, None, 0)
    if header is None:
        return await _submit(call, body, body.idempotency_key)
    if body.idempotency_key is not None:
        both = f"both the field and the header {IDEMPOTENCY_KEY.name}"
        raise InvalidInput("idempotency_key", both, "only one of them")
    try:
        return await _submit(call, body, header)
    except IdConflict:
        raise reused() from None


async def handle(call: RequestContext) -> Response:
    """Accept a job that an upstream queue pushes. Its ``job_id`` is its idempotency key, so it may be pushed again.

    In all other respects, this works like submit. After any successful answer, the upstream queue may delete the job.
    """
    body = await call.body(HandleIn, _BODY, "payload")
    call.demand(queue_of(body.model))
    if body.idempotency_key is not None:
        raise InvalidInput("idempotency_key", "both idempotency_key and job_id", "only job_id")
    check_name("job_id", body.job_id)
    return await _submit(call, body, body.job_id)


async def _submit(
    call: RequestContext, body: SubmissionIn, idempotency_key: str | None
) -> Response:
    submission = body.submission(call.context.backend.now(), idempotency_key)
    match await dispatcher_of(call).submit(submission):
        case Leased(job_id=job_id, server=server):
            return answer(LeasedOut(job_id=job_id, server=server), 202)
        case Queued() as queued:
            out = QueuedOut(
                job_id=queued.job_id,
                position=queued.position,
                estimated_wait=queued.estimated_wait,
            )
            return answer(out, 202)
        case NoSlots() as refused:
            raise ProblemError(
                503,
                "no_slots",
                refused.detail,
                reason=refused.reason,
                headers={"retry-after": retry_after(refused.retry_after)},
            )


async def status(call: RequestContext) -> Response:
    """Return the status of a job, and of the callback that reports its end.

    With ``wait``, the answer is sent once the job has ended, but after that many seconds at the latest.
    """
    most = seconds(call)
    known = await job_of(call)
    await waited(call, known, most)
    match = await dispatcher_of(call).jobs.status(known.task_id)
    if match is None:
        raise unknown_job()
    callback = None
    if match.state not in _LIVE:
        callback = await record_of(call.context.backend, known.task_id)
    return answer(JobOut(**msgspec.structs.asdict(match), callback=callback))


async def result(call: RequestContext) -> Response:
    """Return a job's result, byte for byte as its server sent it.

    With ``wait``, the answer is sent once the job has ended, but after that many seconds at the latest.
    """
    most = seconds(call)
    known = await job_of(call)
    await waited(call, known, most)
    match = await dispatcher_of(call).jobs.result(known.task_id)
    if match is None:
        raise ProblemError(
            404, "no_result", "no result: the job has not succeeded, or its result has expired"
        )
    return Response(match, media_type=JSON)


async def cancel(call: RequestContext) -> Response:
    """Cancel a job that has not ended.

    A running job continues on its server and keeps its slot until the server has ended it, but its result is ignored.
    """
    known = await job_of(call)
    cancelled = await dispatcher_of(call).jobs.cancel(known.task_id)
    call.context.waiters.check_now(known.key, known.task_id)
    return answer(Cancelled(cancelled))


_JOB_EXAMPLE = {"model": "zimg", "payload": {"prompt": "a boat"}}
_EXAMPLE = {
    **_JOB_EXAMPLE,
    "callback_url": "https://app.example.com/gpu-results",
    "idempotency_key": "order-4711",
}
_JOB = "/queue/jobs/{job_id}"
_submitting = partial(
    operation,
    "jobs",
    "POST",
    tag="jobs",
    verb="publish",
    answers={202: (LeasedOut, QueuedOut)},
    problems=(409, 503),
)
_operation = partial(operation, "jobs", tag="jobs", verb=("publish", "admin"), problems=(404, 503))
OPERATIONS = (
    _submitting(
        "/queue/submit", submit, headers=(IDEMPOTENCY_KEY,), body=SubmissionIn, example=_EXAMPLE
    ),
    _operation("GET", _JOB, status, query=(WAIT,), answers={200: JobOut}),
    _operation("GET", f"{_JOB}/result", result, query=(WAIT,), answers={200: None}),
    _operation("DELETE", _JOB, cancel, answers={200: Cancelled}),
    _submitting(
        "/tasks/handle", handle, body=HandleIn, example={"job_id": "upstream-17", **_JOB_EXAMPLE}
    ),
)
