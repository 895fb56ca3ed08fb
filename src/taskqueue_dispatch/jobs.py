"""Jobs as clients submit them, and their conversion to and from tasks of a queue."""

from __future__ import annotations

import re

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_label, check_name, kind_of
from taskqueue_core.tasks import DEFAULT_PRIORITY, Task
from taskqueue_dispatch.names import JOBS, job_id, queue_of

_MODEL = "model"
_CALLBACK = "callback-url"
_CUT = "~"
_ESCAPED = re.compile(r"(?:=[0-9A-F]{2})+")


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A job as submitted by a client. `task_of` checks it."""

    model: str
    payload: bytes = b"null"
    """payload as JSON text, which is sent to the server unchanged"""
    callback_url: str | None = None
    """URL that is notified when the job has ended"""
    priority: int = DEFAULT_PRIORITY
    deadline: float | None = None
    """time after which the job is no longer started, in Unix seconds by the store's clock"""
    not_before: float | None = None
    tenant: str | None = None
    """customer for whom the job runs; with fair order, tenants take turns"""
    idempotency_key: str | None = None
    """key with which the job may be submitted again without being stored twice"""


def task_of(submission: Submission) -> Task:
    """Return a job as a task. The same model, tenant and idempotency key give the same task id.

    Raises `InvalidInput`.
    """
    model, url = submission.model, submission.callback_url
    headers = {_MODEL: model}
    if url is not None:
        if not 0 < len(url) <= LIMITS.url or not url.isprintable():
            raise InvalidInput(
                "callback_url", kind_of(url), f"a URL of 1 to {LIMITS.url} printable characters"
            )
        headers[_CALLBACK] = url
    key = queue_of(model)
    if submission.tenant is not None:
        check_name("tenant", submission.tenant)
    return Task(
        key=key,
        id=job_id(model, submission.idempotency_key, submission.tenant),
        payload=submission.payload,
        headers=headers,
        priority=submission.priority,
        deadline=submission.deadline,
        not_before=submission.not_before,
        tenant=submission.tenant,
    )


def callback_url_of(task: Task) -> str | None:
    """Return the URL that is notified when the job has ended, or ``None`` if the job has no callback."""
    return task.headers.get(_CALLBACK)


def model_of(task: Task) -> str:
    """Return the model of a job. Raises `InvalidInput` if the task is not a job."""
    model = task.headers.get(_MODEL)
    if model and queue_of(model) == task.key:
        return model
    name = model_of_queue(task.key)
    if name is None:
        raise InvalidInput("task", "a task without a model", "a job of the dispatcher")
    return name


def model_of_queue(key: str) -> str | None:
    """Return the model of a queue, or ``None`` if the queue's name does not determine it."""
    if not key.startswith(JOBS) or _CUT in key:
        return None
    try:
        model = _ESCAPED.sub(_unescaped, key.removeprefix(JOBS))
        check_label(_MODEL, model)
    except ValueError:  # `InvalidInput` is a ValueError
        return None
    return model if queue_of(model) == key else None


def _unescaped(match: re.Match[str]) -> str:
    return bytes.fromhex(match[0].replace("=", "")).decode()
