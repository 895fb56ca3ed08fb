"""A callback as a task."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import structs

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_json
from taskqueue_core.tasks import Task
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.outbound_http import read_url

CALLBACK_URL = "callback-url"
"""the header with the URL, of a job and of its callback"""
EXPIRED = "expired"
ENDS = ("done", "failed", EXPIRED, "cancelled", "discarded")
"""what may become of a job"""
QUEUE, JOB = "job-queue", "job-id"
"""headers of a callback that is due only if its job has expired: where to look"""
_LOOKS = 100
_BODY = 20_000
_ERROR = 1000
"""characters"""
_DIGEST = 32
_json = msgspec.json.Encoder()


def callback_task(job: Task, status: str, result: bytes | None, error: str | None) -> Task:
    """Return the task that tells the client of ``job`` what became of it.

    The same job and status make the same task id, so to publish it again is harmless; where the result is another one
    by then (`Published.CONFLICT`) the first is told. The id is the webhook's too, and has no dot. The tenant is the
    host, for the limit of each. The payload is what is sent: ``{"job_id", "status", "result"}`` with ``error`` where
    there is one. A result with which it would have more than 20 kB, or be nested too deep, is left out: ``result`` is
    null then and ``result_omitted`` true.

    Raises `InvalidInput` for a job that came without a URL, and for a status that no job ends with.
    """
    if CALLBACK_URL not in job.headers:
        raise InvalidInput("job", "one without a callback", f"one with the header {CALLBACK_URL}")
    if status not in ENDS:
        raise InvalidInput("status", "an unknown value", ", ".join(ENDS))
    url = job.headers[CALLBACK_URL]
    return Task(
        key=CALLBACKS,
        id=callback_id(job.id, status),
        payload=_payload(job.id, status, result, error),
        headers={CALLBACK_URL: url},
        tenant=_tenant(url),
    )


def expiry_task(job: Task) -> Task:
    """Return the task that tells the client that ``job`` has expired: due at its deadline, if that is so then.

    A job that expires is in nobody's hands, who could tell it. Raises `InvalidInput` as `callback_task`.
    """
    task = callback_task(job, EXPIRED, None, "the deadline has passed")
    return structs.replace(
        task,
        headers=task.headers | {QUEUE: job.key, JOB: job.id},
        not_before=job.deadline,
        max_attempts=_LOOKS,
    )


def callback_id(job_id: str, status: str) -> str:
    """Return the id of the callback that tells of this end of a job."""
    return f"msg_{_digest(f'{status}/{job_id}')}"


def _payload(job_id: str, status: str, result: bytes | None, error: str | None) -> bytes:
    fields: dict[str, object] = {"job_id": job_id, "status": status, "result": None}
    if error is not None:
        fields["error"] = error[:_ERROR].encode(errors="replace").decode()
    if result is None:
        return _json.encode(fields)
    whole = _json.encode(fields | {"result": msgspec.Raw(result)})
    try:
        check_json("result", result, _BODY)
        check_json("payload", whole, _BODY)
    except InvalidInput:
        return _json.encode(fields | {"result_omitted": True})
    return whole


def _tenant(url: str) -> str:
    # A job may come with a URL that nobody has checked: it is refused when it is to be called, and told to nobody.
    try:
        host = read_url(CALLBACK_URL, url).host
    except InvalidInput:
        return "unreadable"
    if ":" in host:
        return f"<{host}>"
    return host if len(host) <= LIMITS.name else f"{host[:100]}~{_digest(host)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST]
