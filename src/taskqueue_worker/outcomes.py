"""Calls of handlers, and the outcomes of what they return or raise."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence

import msgspec
from pydantic import BaseModel

from taskqueue_core.application.context import Context
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_duration, kind_of
from taskqueue_core.protocol.client_outcomes import clean_text
from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.retry import Failed, Outcome, Rejected, RetryLater, Success
from taskqueue_core.tasks import Delivery, encode_json
from taskqueue_worker.arguments import InvalidPayload
from taskqueue_worker.handlers import BatchHandler, Handler

INVALID_RESULT = "invalid_result"
"""the reason of a dead letter whose handler's result is not JSON, or is too large"""

_MAX_DELAY_SECONDS = 365 * 86_400
_NO_RESULT = Success()
_OWN_FRAMES = 1
_log = logging.getLogger("taskqueue.worker")


class Retry(Exception):
    """A request for another attempt, after ``delay`` seconds or by the queue's retry policy. Raise or return it.

    Attempts are limited as for failures. It does not count towards the worker's quarantine.
    """

    def __init__(self, delay: float | None = None, error: str = "retry requested") -> None:
        if delay is not None:
            check_duration("delay", delay)
            if delay > _MAX_DELAY_SECONDS:
                raise InvalidInput(
                    "delay", "a number out of range", "at most 31536000 seconds (a year)"
                )
        super().__init__(error)
        self.delay = delay
        self.error = error


class Reject(Exception):
    """A decision that no attempt can succeed: the task becomes a dead letter. Raise or return it."""

    def __init__(self, reason: str, error: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


def outcome_of_value(value: object, limit: int) -> Outcome:
    """Return the outcome of a handler that returned. Nothing is stored for ``None``."""
    if value is None:
        return _NO_RESULT
    if isinstance(value, Retry | Reject):
        return outcome_of_error(value)
    try:
        text = encode_json("result", _to_builtins(value))
    except InvalidInput as error:
        return Rejected(INVALID_RESULT, str(error))
    except Exception:  # noqa: BLE001 - the handler ran, and a retry would return the same
        return Rejected(
            INVALID_RESULT,
            f"the handler returned a {kind_of(value)}, which cannot be encoded as JSON",
        )
    if len(text) > limit:
        return Rejected(
            INVALID_RESULT, f"the handler returned {len(text)} bytes of JSON; the limit is {limit}"
        )
    return Success(text)


def outcome_of_error(error: BaseException) -> Outcome:
    """Return the outcome of a handler that raised: "Type: message", cut to the limit."""
    match error:
        case Retry():
            return RetryLater(error.delay, clean_text(error.error))
        case InvalidPayload():
            return Rejected(error.code, str(error))
        case Reject():
            return Rejected(
                clean_text(error.reason), None if error.error is None else clean_text(error.error)
            )
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not hide that the handler failed
        message = ""
    return Failed(clean_text(f"{name}: {message[: LIMITS.text]}" if message else name))


def _to_builtins(value: object) -> object:
    """Return a value with its pydantic models converted to JSON types."""
    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case dict():
            return {key: _to_builtins(item) for key, item in value.items()}
        case list() | tuple():
            return [_to_builtins(item) for item in value]
    return value


class Fatal(msgspec.Struct, frozen=True):
    """A handler raised an exception that ends the process."""

    error: BaseException


HandlerEnd = Sequence[Outcome] | Fatal
"""one outcome for each task of a call"""


class RunningTask(msgspec.Struct, eq=False):
    """One delivery that is being executed."""

    delivery: Delivery | WireDelivery
    context: Context
    call: HandlerCall
    settled: bool = False


class HandlerCall(msgspec.Struct, eq=False):
    """One call of a handler: for one task, or for several if the handler takes batches."""

    handler: Handler | BatchHandler
    jobs: list[RunningTask] = []
    releasing: bool = False
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def cancel_if_settled(self) -> None:
        """Cancel the coroutine if all its tasks are settled."""
        if self.task is not None and all(job.settled for job in self.jobs):
            self.task.cancel()


def outcomes_of_return(call: HandlerCall, value: object, limit: int) -> Sequence[Outcome]:
    """Return the outcomes of a call that returned."""
    if not isinstance(call.handler, BatchHandler):
        return (outcome_of_value(value, limit),)
    jobs = call.jobs
    if value is None:
        return [outcome_of_value(None, limit)] * len(jobs)
    if not isinstance(value, list | tuple) or len(value) != len(jobs):
        count = len(value) if isinstance(value, list | tuple) else "no list of"
        failed = Failed(f"the batch handler returned {count} results for {len(jobs)} tasks")
        _log.warning("%s: %s", call.handler.key, failed.error)
        return [failed] * len(jobs)
    return [
        outcome_of_error(item) if isinstance(item, Exception) else outcome_of_value(item, limit)
        for item in value
    ]


def outcomes_of_error(call: HandlerCall, error: BaseException) -> HandlerEnd:
    """Return the outcomes of a call that raised: the same for each of its tasks."""
    if not isinstance(error, Exception):
        return Fatal(error)
    outcome = outcome_of_error(error)
    live = [job for job in call.jobs if not job.settled]
    if isinstance(outcome, Failed) and live:
        # The message is not logged: it may quote the payload. The store gets it with the retry.
        first = live[0].delivery
        _log.warning(
            "task %s%s of %s failed (attempt %d): %s\n%s",
            first.task.id,
            f" and {len(live) - 1} more" if len(live) > 1 else "",
            first.task.key,
            first.attempt,
            type(error).__name__,
            "".join(traceback.format_tb(error.__traceback__)[_OWN_FRAMES:]),
        )
    return [outcome] * len(call.jobs)
