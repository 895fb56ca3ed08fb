"""The tasks in which callbacks are stored."""

from __future__ import annotations

import msgspec
from msgspec import structs

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_json
from taskqueue_core.tasks import Task
from taskqueue_dispatch.names import CALLBACKS, digest
from taskqueue_dispatch.outbound_http.urls import read_url

CALLBACK_URL = "callback-url"
"""name of the task header with the callback URL, in jobs and in callbacks"""
EXPIRED = "expired"
ENDS = ("done", "failed", EXPIRED, "cancelled", "discarded")
"""statuses with which a job can end"""
QUEUE, JOB = "job-queue", "job-id"
"""names of the task headers with the job's queue and id; only callbacks from `expiry_task` have them"""
_MAX_CHECKS = 100
_MAX_BODY = 20_000
"""largest body of a callback in bytes"""
_MAX_ERROR = 1000
"""largest error text in a callback, in characters"""
_DIGEST = 32
_json = msgspec.json.Encoder()


def callback_task(job: Task, status: str, result: bytes | None, error: str | None) -> Task:
    """Return the task of the callback that reports to the client how ``job`` ended.

    The task id depends only on the job id and the status, so publishing the callback again has no effect, even with
    another result (`Published.CONFLICT`). The id is also the webhook's id, and contains no dot. The tenant is that of
    the job, or the receiver's host if the job has none, so that tenants take turns. The payload is the request body:
    ``{"job_id", "status", "result"}``, with ``error`` if there is one. If the body would exceed 20 kB or be nested too
    deeply, ``result`` is null and ``result_omitted`` is true.

    Raises `InvalidInput` for a job without a callback URL, and for an unknown status.
    """
    if CALLBACK_URL not in job.headers:
        raise InvalidInput(
            "job", "a job without a callback", f"a job with the header {CALLBACK_URL}"
        )
    if status not in ENDS:
        raise InvalidInput("status", "an unknown value", ", ".join(ENDS))
    url = job.headers[CALLBACK_URL]
    return Task(
        key=CALLBACKS,
        id=callback_id(job.id, status),
        payload=_payload(job.id, status, result, error),
        headers={CALLBACK_URL: url},
        tenant=job.tenant or host_of(url),
    )


def expiry_task(job: Task) -> Task:
    """Return the callback that reports the expiry of ``job``.

    The callback is due at the job's deadline, and is not sent if the job did not expire. It is published right after
    the job, because no process handles a job at the moment when the job expires.

    Raises `InvalidInput`, like `callback_task`.
    """
    task = callback_task(job, EXPIRED, None, "the deadline has passed")
    return structs.replace(
        task,
        headers=task.headers | {QUEUE: job.key, JOB: job.id},
        not_before=job.deadline,
        max_attempts=_MAX_CHECKS,
    )


def callback_id(job_id: str, status: str) -> str:
    """Return the id of the callback that reports that a job ended with ``status``."""
    return f"msg_{digest(f'{status}/{job_id}')[:_DIGEST]}"


def _payload(job_id: str, status: str, result: bytes | None, error: str | None) -> bytes:
    fields: dict[str, object] = {"job_id": job_id, "status": status, "result": None}
    if error is not None:
        fields["error"] = error[:_MAX_ERROR].encode(errors="replace").decode()
    if result is None:
        return _json.encode(fields)
    whole = _json.encode(fields | {"result": msgspec.Raw(result)})
    try:
        check_json("result", result, "result")
        check_json("payload", whole, "payload")
        fits = len(whole) <= _MAX_BODY
    except InvalidInput:
        fits = False
    return whole if fits else _json.encode(fields | {"result_omitted": True})


def host_of(url: str) -> str:
    """Return the host of a callback URL in the form of a tenant's name; the URL may be invalid."""
    # Raise no error here, because the URL is checked before the request is sent.
    try:
        host = read_url(CALLBACK_URL, url).host
    except InvalidInput:
        return "unreadable"
    if ":" in host:
        return f"<{host}>"
    return host if len(host) <= LIMITS.name else f"{host[:100]}~{digest(host)[:_DIGEST]}"
