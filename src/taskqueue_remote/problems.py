"""Translation of unsuccessful HTTP responses to the exceptions that a local backend would raise."""

from __future__ import annotations

import msgspec

from taskqueue_core.errors import (
    BackendUnavailable,
    CapabilityMissing,
    ConfigurationError,
    IdConflict,
    InvalidInput,
    LeaseLost,
    NotUnique,
    PublishUnconfirmed,
    QueueFull,
    QueueInUse,
    SettingsConflict,
    TaskQueueError,
    TooLarge,
    UnknownKey,
)
from taskqueue_core.workflows import InvalidWorkflow, UnknownWorkflow

_MAX_DETAIL = 300
_ERRORS: dict[str, type[TaskQueueError]] = {
    kind.code: kind
    for kind in (
        BackendUnavailable,
        CapabilityMissing,
        ConfigurationError,
        IdConflict,
        InvalidInput,
        InvalidWorkflow,
        LeaseLost,
        NotUnique,
        PublishUnconfirmed,
        QueueFull,
        QueueInUse,
        SettingsConflict,
        TooLarge,
        UnknownKey,
        UnknownWorkflow,
    )
}
_ACCESS_DENIED = (401, 403)
_TRY_LATER = (429, 503)
_NO_SUCH_METHOD = (404, 405, 501)
_REDIRECTS = range(300, 400)
_SERVER_ERRORS = range(500, 600)


class RemoteProblem(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a problem+json body. If a response has another body, only ``status`` is set."""

    status: int = 0
    code: str = ""
    detail: str = ""
    field: str | None = None


_decoder = msgspec.json.Decoder(RemoteProblem)


def problem_of(status: int, body: bytes) -> RemoteProblem:
    """Decode a problem+json body. For any other body, for example from a proxy, return a problem without a code."""
    try:
        problem = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return RemoteProblem(status=status)
    return msgspec.structs.replace(problem, status=status, detail=problem.detail[:_MAX_DETAIL])


def to_error(problem: RemoteProblem, server: str) -> TaskQueueError:
    """Return the exception for a problem. ``server`` is the address of the server, for the exception's message."""
    status, code, detail = problem.status, problem.code, problem.detail
    if kind := _ERRORS.get(code):
        if issubclass(kind, InvalidInput):
            return _field_error(kind, problem)
        return kind(detail or f"the server responded with status {status}")
    if status in _ACCESS_DENIED:
        return ConfigurationError(
            f"the server at {server} rejected the request ({status}): {detail or 'no reason given'}; "
            "check TASKQUEUE_TOKEN"
        )
    if status in _REDIRECTS or (status in _NO_SUCH_METHOD and not code):
        return ConfigurationError(
            f"the server at {server} is not a taskqueue server (status {status}): check TASKQUEUE_SERVER_URL"
        )
    if status in _TRY_LATER or status in _SERVER_ERRORS:
        return BackendUnavailable(
            detail or f"the server at {server} responded with status {status}"
        )
    return TaskQueueError(
        f"the server responded with status {status}: {detail or code or 'no reason given'}"
    )


def _field_error(kind: type[InvalidInput], problem: RemoteProblem) -> InvalidInput:
    text = problem.detail.removeprefix(f"{problem.field}: ").removeprefix("got ")
    got, _, allowed = text.partition("; allowed: ")
    return kind(problem.field or "request", got, allowed or "a value that the API accepts")
