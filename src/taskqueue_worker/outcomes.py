"""The outcomes that follow from what handlers return or raise."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context

import msgspec

from taskqueue_core.application.arguments import InvalidPayload
from taskqueue_core.application.context import Context
from taskqueue_core.application.encoding import Encoding
from taskqueue_core.application.errors import InvalidResult
from taskqueue_core.application.results import Results
from taskqueue_core.application.rules import Reject, Retry, Rule, Snooze, rule_for
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, clean_text, clean_traceback, kind_of
from taskqueue_core.queue import Queue
from taskqueue_core.retry import Failed, Outcome, Rejected, RetryLater, Snoozed, Success
from taskqueue_core.sync import SyncQueue
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.handlers import Handler
from taskqueue_worker.slots import SlotLoan, Slots
from taskqueue_worker.task_log import TaskLog, without_own

INVALID_RESULT = "invalid_result"
"""reason of a dead letter if the handler returned a result that is too large or cannot be encoded as JSON"""

_NO_RESULT = Success()
_ANY_RETRY = Retry()
_log = logging.getLogger("taskqueue.worker")


def outcome_of_value(
    value: object, limit: int, results: Results, encoding: Encoding | None = None
) -> Outcome:
    """Return the outcome for a handler's return value: a rejection if it has no JSON of up to ``limit`` bytes.

    ``results`` writes it by the handler's return annotation, and ``encoding`` encodes it.
    """
    if value is None and results.optional:
        return _NO_RESULT
    if isinstance(value, Rule):
        return outcome_of_error(value, encoding)
    try:
        plain = results.write(value, "payload" if encoding is None else "decoded")
        text = plain if encoding is None else encoding.result(plain)
    except (InvalidInput, InvalidResult) as error:
        fault = str(error)
    except Exception:  # noqa: BLE001 - an encoder may raise any exception
        fault = f"the handler returned a {kind_of(value)}, which cannot be encoded as JSON"
    else:
        if len(text) <= limit:
            return Success(text)
        fault = f"the handler returned {len(text)} bytes of JSON; the limit is {limit}"
    return Rejected(INVALID_RESULT, fault)


def outcome_of_error(error: BaseException, encoding: Encoding | None = None) -> Outcome:
    """Return the outcome for a handler's exception. A failure has the text "Type: message", cut if it is too long.

    ``encoding`` encodes all texts but the type, and leaves out the traceback, which may contain values.
    """
    match error:
        case Retry():
            # A retry that a handler asks for has a traceback only if another exception is the reason.
            has_reason = error.__cause__ is not None or error.__context__ is not None
            trace = _traceback_of(error, encoding) if has_reason else None
            return RetryLater(error.delay, _text(error.error, encoding), trace)
        case Snooze():
            return Snoozed(error.delay)
        case InvalidPayload():
            return Rejected(error.code, str(error))
        case Reject():
            return Rejected(
                clean_text(error.reason),
                None if error.error is None else _text(error.error, encoding),
                _traceback_of(error, encoding),
            )
    name = type(error).__name__
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - __str__ may raise any exception
        message = ""
    message = message[: LIMITS.text]
    if encoding is not None:
        return Failed(encoding.error_of(name, message))
    return Failed(clean_text(f"{name}: {message}" if message else name), traceback_of(error))


def _text(text: str, encoding: Encoding | None) -> str:
    return clean_text(text) if encoding is None else encoding.error(text[: LIMITS.text])


def _traceback_of(error: BaseException, encoding: Encoding | None) -> str | None:
    return traceback_of(error) if encoding is None else None


def traceback_of(error: BaseException) -> str | None:
    """Return the end of an exception's traceback, with its causes; ``None`` if it was not raised.

    The frames of this project that call the handler are left out.
    """
    if error.__traceback__ is None:
        return None
    try:
        lines = traceback.format_exception(type(error), error, without_own(error.__traceback__))
    except Exception:  # noqa: BLE001 - the text of an exception may raise any exception
        lines = traceback.format_tb(without_own(error.__traceback__))
    return clean_traceback("".join(lines))


HandlerEnd = Sequence[Outcome] | BaseException
"""how a call of a handler ended: with one outcome for each task, or with an exception that ends the process"""


class RunningTask(msgspec.Struct, eq=False):
    """A delivery whose handler is running."""

    delivery: AnyDelivery
    context: Context
    call: HandlerCall
    settled: bool = False


class HandlerCall(msgspec.Struct, eq=False):
    """A running call of a handler, for one task or, with a batch handler, for several tasks.

    It is the `HandlerScope` of the code inside the handler.
    """

    handler: Handler
    slots: Slots
    jobs: list[RunningTask] = []
    releasing: bool = False
    task: asyncio.Task[None] | None = None
    timeout: float | None = None
    """the shortest timeout in seconds that its deliveries carry"""
    timer: asyncio.TimerHandle | None = None
    loan: SlotLoan | None = None
    adds: bool = True
    """whether the handler may still add steps to the workflows of its tasks"""

    def queue(self) -> Queue | None:
        return self.slots.worker.queue()

    def sync_queue(self) -> SyncQueue | None:
        return self.slots.worker.sync_queue()

    def waiting(self, queue: Queue, key: str, task_id: str) -> AbstractAsyncContextManager[None]:
        return self._loan().waiting(queue, key, task_id)

    def resumed(self) -> AbstractAsyncContextManager[None]:
        return self._loan().resumed()

    def _loan(self) -> SlotLoan:
        if self.loan is None:
            self.loan = SlotLoan(self.slots, self)
        return self.loan

    @property
    def discarded(self) -> bool:
        """Whether what the call returns will be ignored."""
        return self.releasing or all(job.settled for job in self.jobs)

    def cancel_if_settled(self) -> None:
        """Cancel the handler's coroutine if all tasks of the call are settled."""
        if self.task is not None and all(job.settled for job in self.jobs):
            self.task.cancel()


def outcomes_of_return(
    call: HandlerCall, value: object, limit: int, log: TaskLog
) -> Sequence[Outcome]:
    """Return one outcome for each task of a call whose handler returned ``value``. All but successes are logged."""
    jobs, encoding = call.jobs, call.handler.encoding
    if not call.handler.options.batch:
        outcome = outcome_of_value(value, limit, call.handler.results, encoding)
        if type(outcome) is not Success and not jobs[0].settled:
            log.ended(jobs[0].delivery, outcome)
        return (outcome,)
    if value is None:
        return [_NO_RESULT] * len(jobs)
    if not isinstance(value, list | tuple) or len(value) != len(jobs):
        failed = Failed(
            f"the batch handler returned a {kind_of(value)}; "
            f"it must return a list with one result per task ({len(jobs)}), or nothing"
        )
        _log.warning("%s: %s", call.handler.name, failed.error)
        return [failed] * len(jobs)
    outcomes = []
    for job, item in zip(jobs, value, strict=True):
        if isinstance(item, Exception):
            outcome, reason = _outcome_by_rules(job, item, outcome_of_error(item, encoding))
            if isinstance(outcome, Failed) and not job.settled:
                copy_context().run(log.failed_alone, [job.delivery], reason, outcome.traceback)
        else:
            outcome = outcome_of_value(item, limit, call.handler.results, encoding)
        if not job.settled:
            log.ended(job.delivery, outcome)
        outcomes.append(outcome)
    return outcomes


def outcomes_of_error(
    call: HandlerCall, error: BaseException, log: TaskLog, failed: Failed | None = None
) -> HandlerEnd:
    """Return one outcome per task of a call whose handler raised ``error``, or ``error`` if it ends the process.

    ``failed`` is the outcome if no rule decides, by default that of ``error``. Failures, rejections, retries and
    snoozes are logged.
    """
    if not isinstance(error, Exception):
        return error
    usual = failed or outcome_of_error(error, call.handler.encoding)
    outcomes: list[Outcome] = []
    failures: dict[int, tuple[Failed, Exception, list[AnyDelivery]]] = {}
    for job in call.jobs:
        outcome, reason = _outcome_by_rules(job, error, usual)
        outcomes.append(outcome)
        if job.settled:
            continue
        if type(outcome) is Failed:  # faster than `isinstance` for other structs
            failures.setdefault(id(reason), (outcome, reason, []))[2].append(job.delivery)
        else:
            log.ended(job.delivery, outcome)
    for failure, reason, deliveries in failures.values():
        log.failed(deliveries, reason, failure.traceback)
    return outcomes


def _outcome_by_rules(
    job: RunningTask, error: Exception, outcome: Outcome
) -> tuple[Outcome, Exception]:
    """Return the outcome of an attempt that raised ``error``, and the exception that is the reason for it.

    ``outcome`` is the one without rules. If the function of a rule raises an exception, that is the reason: the
    attempt fails because of it.
    """
    rules, encoding = job.call.handler.options.on_error, job.call.handler.encoding
    if not rules or isinstance(error, Rule | InvalidPayload):
        return outcome, error
    try:
        rule = rule_for(rules, error, job.context)
    except Exception as wrong:  # noqa: BLE001 - a rule may raise any exception
        wrong.__context__ = wrong.__context__ or error
        return outcome_of_error(wrong, encoding), wrong
    if rule is None or not isinstance(outcome, Failed):
        return outcome, error
    match rule:
        case Retry():
            own = rule.error != _ANY_RETRY.error
            text = _text(rule.error, encoding) if own else outcome.error
            return RetryLater(rule.delay, text, outcome.traceback), error
        case Reject():
            text = outcome.error if rule.error is None else _text(rule.error, encoding)
            return Rejected(clean_text(rule.reason), text, outcome.traceback), error
        case Snooze():
            return Snoozed(rule.delay), error
