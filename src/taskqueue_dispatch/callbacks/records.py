"""What became of a callback, read from where its task is kept."""

from __future__ import annotations

import msgspec

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of
from taskqueue_core.tasks import DeadLetter, State, TaskStatus
from taskqueue_dispatch.callbacks.tasks import ENDS, EXPIRED, callback_id
from taskqueue_dispatch.names import CALLBACKS

_NOT_YET = {State.SCHEDULED, State.CANCELLED}
"""states of a callback that waits for its job's deadline, or has found no expiry to tell of"""
_WORDS = {State.DONE: "delivered", State.DEAD: "failed"}


class CallbackReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a delivered callback."""

    http_status: int
    length: int
    """bytes of the answer that were read; what they were is kept nowhere"""
    seconds: float
    """that the attempt took"""


class CallbackRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One callback."""

    webhook_id: str
    job_status: str
    """what it tells"""
    state: str
    """``pending``, ``delivered``, ``failed`` (a dead letter), ``cancelled`` or ``discarded``"""
    attempt: int
    """the last one, or the one that comes"""
    updated_at: float
    reason: str | None = None
    """why it was given up: ``refused``, ``gone``, ``max_retries_exceeded`` or another"""
    error: str | None = None
    """of the last attempt that failed"""
    http_status: int | None = None
    """of the answer that took it"""
    length: int | None = None
    seconds: float | None = None


async def record_of(backend: Backend, job_id: str) -> CallbackRecord | None:
    """Return the newest callback of a job; ``None`` where there is none, or it was forgotten.

    A job that failed and was taken up again may have two.
    """
    control = control_of(backend)
    ids = [callback_id(job_id, status) for status in ENDS]
    statuses = await control.statuses(CALLBACKS, *ids)
    known = [
        (status, name)
        for status, name in zip(statuses, ENDS, strict=True)
        if status is not None and not (name == EXPIRED and status.state in _NOT_YET)
    ]
    if not known:
        return None
    status, name = max(known, key=lambda pair: pair[0].updated_at)
    results = await control.results(CALLBACKS, status.task_id)
    dead = None
    if status.state is State.DEAD:
        dead = await dead_letters_of(backend).get(CALLBACKS, status.task_id)
    return _record_of(status, name, _receipt(results[0]), dead)


def _record_of(
    status: TaskStatus, name: str, receipt: CallbackReceipt | None, dead: DeadLetter | None
) -> CallbackRecord:
    error = None if status.state is State.DONE else status.error
    if dead is not None and dead.history:
        error = dead.history[-1].error
    return CallbackRecord(
        webhook_id=status.task_id,
        job_status=name,
        state="pending" if status.state.live else _WORDS.get(status.state, status.state.value),
        attempt=status.attempt,
        updated_at=status.updated_at,
        reason=dead.reason if dead else None,
        error=error,
        http_status=receipt.http_status if receipt else None,
        length=receipt.length if receipt else None,
        seconds=receipt.seconds if receipt else None,
    )


def _receipt(result: bytes | None) -> CallbackReceipt | None:
    try:
        return None if result is None else msgspec.json.decode(result, type=CallbackReceipt)
    except msgspec.MsgspecError:
        return None  # a foreign hand's
