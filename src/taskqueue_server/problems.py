"""Errors as problem documents (RFC 9457): what went wrong, for people and for programs; never how."""

from __future__ import annotations

import logging
from http import HTTPStatus
from math import ceil

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from taskqueue_core.errors import (
    BackendUnavailable,
    CapabilityMissing,
    IdConflict,
    InvalidInput,
    LeaseLost,
    PublishUnconfirmed,
    QueueFull,
    SettingsConflict,
    TaskQueueError,
)
from taskqueue_core.tasks import Refusal

PROBLEM_TYPE = "application/problem+json"
_RETRY_SECONDS = 1.0
_STATUS: dict[type[TaskQueueError], int] = {
    InvalidInput: 422,
    IdConflict: 409,
    SettingsConflict: 409,
    LeaseLost: 409,
    PublishUnconfirmed: 503,
    BackendUnavailable: 503,
    CapabilityMissing: 501,
}
_REFUSED: dict[str | None, int] = {
    None: 429,
    Refusal.QUEUE_FULL: 429,
    Refusal.TENANT_FULL: 429,
    Refusal.MOVED: 409,
}
_NOT_NOW = 503
"""for a refusal that has nothing to do with how much was published to the queue"""
_ROUTING = {
    404: ("not_found", "nothing found at this path"),
    405: ("method_not_allowed", "the method is not allowed at this path"),
}
_log = logging.getLogger("taskqueue.server.http")
_encoder = msgspec.json.Encoder()


class HttpProblem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A problem document."""

    type: str = msgspec.field(default_factory=lambda: "about:blank")
    title: str
    status: int
    detail: str
    code: str
    """stable, for programs"""
    field: str | None = None
    """what of the request is wrong"""
    reason: str | None = None
    """why not now, where there are several reasons for the same code"""


class ProblemError(Exception):
    """Ends a request with a problem."""

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
    """Return the response that carries a problem."""
    return Response(
        _encoder.encode(error.problem),
        status_code=error.problem.status,
        headers=error.headers,
        media_type=PROBLEM_TYPE,
    )


def problem_of(error: Exception) -> ProblemError:
    """Turn any error into a problem. Only errors of the package speak for themselves; others are logged and kept in."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, HTTPException):
        code, detail = _ROUTING.get(error.status_code, ("http_error", error.detail))
        return ProblemError(error.status_code, code, detail, headers=dict(error.headers or {}))
    if isinstance(error, TaskQueueError):
        return _of_ours(error)
    if isinstance(error, ClientDisconnect):
        return ProblemError(400, "disconnected", "the request ended before its body was complete")
    _log.error("a request failed", exc_info=error)
    return ProblemError(500, "internal", "internal error; see the log of the server")


def _of_ours(error: TaskQueueError) -> ProblemError:
    if isinstance(error, QueueFull):
        status = refusal_status(error.code)
    else:
        status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
    headers = {}
    if status in (429, 503):
        wait = error.retry_after if isinstance(error, QueueFull) else None
        headers["retry-after"] = retry_after(wait)
    field = error.field if isinstance(error, InvalidInput) else None
    return ProblemError(status, error.code, str(error), field=field, headers=headers)


def refusal_status(code: str | None) -> int:
    """Return the status of a refused publish: too much was published, not now, or never again here."""
    return _REFUSED.get(code, _NOT_NOW)


def retry_after(seconds: float | None) -> str:
    """Return the value of a ``Retry-After`` header: whole seconds, at least one."""
    return str(max(1, ceil(seconds if seconds is not None else _RETRY_SECONDS)))


async def problem_response(_: Request, error: Exception) -> Response:
    """Answer for errors that Starlette meets: unknown paths and methods."""
    return respond(problem_of(error))
