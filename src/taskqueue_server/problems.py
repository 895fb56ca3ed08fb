"""Error responses as problem documents (RFC 9457), which reveal nothing about the server's internals."""

from __future__ import annotations

import logging
from http import HTTPStatus
from math import ceil

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from taskqueue_core import errors
from taskqueue_core.tasks import Refusal
from taskqueue_core.workflows import UnknownWorkflow

PROBLEM_TYPE = "application/problem+json"
_RETRY_SECONDS = 1.0
_STATUS: dict[type[errors.TaskQueueError], int] = {
    errors.InvalidInput: 422,
    errors.TooLarge: 413,
    UnknownWorkflow: 404,
    errors.IdConflict: 409,
    errors.NotUnique: 409,
    errors.SettingsConflict: 409,
    errors.QueueInUse: 409,
    errors.LeaseLost: 409,
    errors.PublishUnconfirmed: 503,
    errors.BackendUnavailable: 503,
    errors.CapabilityMissing: 501,
}
_REFUSED: dict[str | None, int] = {
    None: 429,
    Refusal.QUEUE_FULL: 429,
    Refusal.TENANT_FULL: 429,
    Refusal.MOVED: 409,
    Refusal.NOT_UNIQUE: 409,
    Refusal.BATCH_CLOSED: 409,
    Refusal.TOO_MANY_PARENTS: 409,
    Refusal.PARENT_REFUSED: 409,
}
_NOT_NOW = 503
"""HTTP status for each `Refusal` code that is not in `_REFUSED`, for example if the intake is paused"""
_ROUTING = {
    404: ("not_found", "no resource at this path"),
    405: ("method_not_allowed", "method not allowed at this path"),
}
_log = logging.getLogger("taskqueue.server.http")
_encoder = msgspec.json.Encoder()


class HttpProblem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem document (RFC 9457)."""

    type: str = msgspec.field(default_factory=lambda: "about:blank")
    title: str
    status: int
    detail: str
    code: str
    """stable identifier of the error, for programs"""
    field: str | None = None
    """name of the invalid field of the request"""
    reason: str | None = None
    """more specific cause, if several causes share a ``code``"""


class ProblemError(Exception):
    """An error that ends a request with a problem document."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = HttpProblem(
            title=HTTPStatus(status).phrase,
            status=status,
            detail=detail,
            code=code,
            field=field,
            reason=reason,
        )
        self.headers = headers or {}


def respond(error: ProblemError) -> Response:
    """Return an HTTP response with the error's problem document."""
    return Response(
        _encoder.encode(error.problem),
        status_code=error.problem.status,
        headers=error.headers,
        media_type=PROBLEM_TYPE,
    )


def problem_of(error: Exception) -> ProblemError:
    """Return the problem for any error. An unexpected error is logged, and the client gets only a general message."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, HTTPException):
        code, detail = _ROUTING.get(error.status_code, ("http_error", error.detail))
        return ProblemError(error.status_code, code, detail, headers=dict(error.headers or {}))
    if isinstance(error, errors.TaskQueueError):
        return _of_ours(error)
    if isinstance(error, ClientDisconnect):
        return ProblemError(400, "disconnected", "the request ended before its body was complete")
    _log.error("request failed", exc_info=error)
    return ProblemError(500, "internal", "internal error; see the server's log")


def _of_ours(error: errors.TaskQueueError) -> ProblemError:
    if isinstance(error, errors.QueueFull):
        status = refusal_status(error.code)
    else:
        status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
    wait = error.retry_after if isinstance(error, errors.QueueFull) else None
    headers = {"retry-after": retry_after(wait)} if status in (429, 503) else {}
    field = error.field if isinstance(error, errors.InvalidInput) else None
    return ProblemError(status, error.code, str(error), field=field, headers=headers)


def refusal_status(code: str | None) -> int:
    """Return the HTTP status for the `Refusal` code of a refused publish."""
    return _REFUSED.get(code, _NOT_NOW)


def retry_after(seconds: float | None) -> str:
    """Return the value of a ``Retry-After`` header: ``seconds`` rounded up, but at least 1. ``None`` gives 1."""
    return str(max(1, ceil(seconds if seconds is not None else _RETRY_SECONDS)))


async def problem_response(_: Request, error: Exception) -> Response:
    """Return the response for an error that Starlette caught, such as an unknown path or method."""
    return respond(problem_of(error))
