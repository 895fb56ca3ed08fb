"""From an HTTP answer that is not a success to the error that a local backend would have raised."""

from __future__ import annotations

import msgspec

from taskqueue_core.errors import (
    BackendUnavailable,
    CapabilityMissing,
    ConfigurationError,
    IdConflict,
    InvalidInput,
    LeaseLost,
    PublishUnconfirmed,
    QueueFull,
    SettingsConflict,
    TaskQueueError,
    UnknownKey,
)

__all__ = ["RemoteProblem", "problem_of", "to_error"]

_SHOWN = 300
_PLAIN: dict[str, type[TaskQueueError]] = {
    kind.code: kind
    for kind in (
        BackendUnavailable,
        CapabilityMissing,
        ConfigurationError,
        IdConflict,
        LeaseLost,
        PublishUnconfirmed,
        QueueFull,
        SettingsConflict,
    )
}
_NAMED: dict[str, type[InvalidInput]] = {kind.code: kind for kind in (InvalidInput, UnknownKey)}
_REFUSES = (401, 403)
_NOT_NOW = (429, 503)
_NOT_FOUND = 404
_REDIRECTS = range(300, 400)
_FAULTS = range(500, 600)


class RemoteProblem(msgspec.Struct, frozen=True, kw_only=True):
    """What a problem+json document says, or as much as the status alone does."""

    status: int = 0
    code: str = ""
    detail: str = ""
    field: str | None = None


_decoder = msgspec.json.Decoder(RemoteProblem)


def problem_of(status: int, body: bytes) -> RemoteProblem:
    """Read a problem+json body. Anything else, as from a proxy, gives a problem without a code."""
    try:
        problem = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return RemoteProblem(status=status)
    return msgspec.structs.replace(problem, status=status, detail=problem.detail[:_SHOWN])


def to_error(problem: RemoteProblem, server: str) -> TaskQueueError:
    """Return the error that a problem stands for. ``server`` is its address, for the reader."""
    status, code, detail = problem.status, problem.code, problem.detail
    if code in _NAMED:
        return _named(_NAMED[code], problem)
    if code in _PLAIN:
        return _PLAIN[code](detail or f"the server answered {status}")
    if status in _REFUSES:
        return ConfigurationError(
            f"the server at {server} refuses this client ({status}): {detail or 'check TASKQUEUE_TOKEN'}"
        )
    if status in _NOT_NOW or status in _FAULTS:
        return BackendUnavailable(detail or f"the server at {server} answered {status}")
    if status in _REDIRECTS or (status == _NOT_FOUND and not code):
        return ConfigurationError(
            f"what answers at {server} is no taskqueue server (status {status}): check TASKQUEUE_SERVER_URL"
        )
    return TaskQueueError(f"the server answered {status}: {detail or code or 'no reason given'}")


def _named(kind: type[InvalidInput], problem: RemoteProblem) -> InvalidInput:
    said = problem.detail.removeprefix(f"{problem.field}: ").removeprefix("got ")
    got, _, allowed = said.partition("; allowed: ")
    return kind(problem.field or "request", got, allowed or "what the API describes")
