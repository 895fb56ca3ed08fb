"""The outcome of a job's callback, read from the callback's task in the store."""

from __future__ import annotations

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.tasks import State
from taskqueue_dispatch.callbacks.tasks import ENDS, EXPIRED, callback_id
from taskqueue_dispatch.names import CALLBACKS

_NOT_EXPIRED = {State.SCHEDULED, State.CANCELLED}
"""states in which the callback that would report a job's expiry is not due yet, or is not needed"""
_STATES = {State.DONE: "delivered", State.DEAD: "failed"}


class CallbackReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The data that the store keeps about a delivered callback."""

    http_status: int
    length: int
    """number of bytes that were read of the response body, whose content is not stored"""
    seconds: float
    """duration of the successful attempt in seconds"""


class CallbackRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a callback."""

    webhook_id: str
    job_status: str
    """final status of the job, as the callback reports it"""
    state: str
    """``pending``, ``delivered``, ``failed`` (a dead letter), ``cancelled`` or ``discarded``"""
    attempt: int
    """number of the last attempt; while the callback waits for a retry, number of the next attempt"""
    updated_at: float
    reason: str | None = None
    """reason why the callback has failed permanently, such as ``refused``, ``gone`` or ``max_retries_exceeded``"""
    error: str | None = None
    """error of the last failed attempt"""
    http_status: int | None = None
    """HTTP status of the successful response"""
    length: int | None = None
    seconds: float | None = None


async def record_of(backend: Backend, job_id: str) -> CallbackRecord | None:
    """Return the record of a job's newest callback, or ``None`` if there is no callback or its record has expired.

    A job that failed, was redriven and ended again may have two callbacks.
    """
    control = control_of(backend)
    ids = [callback_id(job_id, status) for status in ENDS]
    statuses = await control.statuses(CALLBACKS, *ids)
    known = [
        (status, name)
        for status, name in zip(statuses, ENDS, strict=True)
        if status is not None and not (name == EXPIRED and status.state in _NOT_EXPIRED)
    ]
    if not known:
        return None
    status, name = max(known, key=lambda pair: pair[0].updated_at)
    (result,) = await control.results(CALLBACKS, status.task_id)
    receipt, dead = _receipt(result), None
    error = None if status.state is State.DONE else status.error
    if status.state is State.DEAD:
        dead = await dead_letters_of(backend).get(CALLBACKS, status.task_id)
    if dead is not None and dead.history:
        error = dead.history[-1].error
    return CallbackRecord(
        webhook_id=status.task_id,
        job_status=name,
        state="pending" if status.state.live else _STATES.get(status.state, status.state.value),
        attempt=status.attempt,
        updated_at=status.updated_at,
        reason=dead.reason if dead else None,
        error=error,
        **({} if receipt is None else msgspec.structs.asdict(receipt)),
    )


def _receipt(result: bytes | None) -> CallbackReceipt | None:
    try:
        return None if result is None else msgspec.json.decode(result, type=CallbackReceipt)
    except msgspec.MsgspecError:
        # The result of the task is not a receipt, because another program settled the task.
        return None
