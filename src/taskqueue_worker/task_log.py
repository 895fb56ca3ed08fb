"""Log records of tasks: the fields that each record of a running task carries, and the records of attempts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import taskqueue_core.application
from taskqueue_core.application.encoding import readable_error
from taskqueue_core.limits import is_whole
from taskqueue_core.retry import Outcome, Rejected, RetryLater, Snoozed
from taskqueue_worker.batch_buffer import AnyDelivery

_Call: TypeAlias = "tuple[str, AnyDelivery, int]"
"""id of the worker, the first delivery of a call of a handler, and the number of its tasks"""
FIELDS = ("task_id", "key", "attempt", "tenant", "worker_id")
"""names of the attributes that the log records of a running task carry"""
_current: ContextVar[_Call | None] = ContextVar("taskqueue_task", default=None)
_OWN_FOLDERS = (str(Path(__file__).parent), taskqueue_core.application.__path__[0])
_MOST_CAUSES = 100
"""maximum number of exceptions of a chain that are logged without their texts"""
_LEVELS = {Rejected: logging.WARNING, RetryLater: logging.INFO, Snoozed: logging.INFO}
"""levels of the records of outcomes that handlers ask for"""
_MAKE_RECORD = logging.Logger.makeRecord.__code__
_log = logging.getLogger("taskqueue.worker")


class TaskLog:
    """What a worker adds to the log for its tasks."""

    def __init__(self, worker_id: str, *, hide_texts: bool = False) -> None:
        """Make log records carry the fields of the task in whose context they are made.

        With ``hide_texts``, the text of an exception is left out, because it may quote the payload.
        """
        self._worker_id = worker_id
        self._hide_texts = hide_texts
        self._bind: Callable[..., object] | Literal[False] | None = None
        factory = logging.getLogRecordFactory()
        if not isinstance(factory, _RecordFactory):
            logging.setLogRecordFactory(_RecordFactory(factory))

    def enter(self, first: AnyDelivery, number: int = 1) -> None:
        """Let all log records of the current context carry the fields of a task, or of the ``number`` tasks of a batch.

        The records of a batch carry only ``key`` and ``worker_id``. With structlog, events carry the fields, too.
        """
        call = (self._worker_id, first, number)
        _current.set(call)
        if self._bind is not False:
            self._bind = self._bind or _structlog_binder()
            if self._bind:
                self._bind(**_fields(call))

    def failed(
        self, deliveries: Sequence[AnyDelivery], error: BaseException, traceback: str | None = None
    ) -> None:
        """Log a failed attempt, with the traceback without the frames of this project that call the handler.

        ``traceback`` is its text, as it is stored. Logs in the format of `taskqueue_core.logs` show the same text.
        """
        first, more = deliveries[0], len(deliveries) - 1
        with suppress(
            Exception
        ):  # what the application's logging raises must not change the outcome
            _log.warning(
                "task %s%s of %s failed (attempt %d)",
                first.task.id,
                f" and {more} more" if more else "",
                first.task.key,
                first.attempt,
                exc_info=self.exc_info(error, traceback),
            )

    def not_stored(self, delivery: AnyDelivery, error: BaseException) -> None:
        """Log that the steps which a task has added could not be stored, so that it runs again."""
        with suppress(Exception):  # as above
            message = "the steps that task %s of %s has added are not stored, so it runs again: %s"
            _log.warning(message, delivery.task.id, delivery.task.key, error)

    def failed_alone(
        self, deliveries: Sequence[AnyDelivery], error: BaseException, traceback: str | None = None
    ) -> None:
        """Log a failed attempt outside of its call; must be run in a context of its own."""
        self.enter(deliveries[0], len(deliveries))
        self.failed(deliveries, error, traceback)

    def ended(self, delivery: AnyDelivery, outcome: Outcome) -> None:
        """Log a rejection, a requested retry or a snooze, with the fields of its task."""
        level = _LEVELS.get(type(outcome))
        if level is not None and _log.isEnabledFor(level):
            with suppress(Exception):  # as above
                copy_context().run(self._ended_alone, delivery, outcome)

    def _ended_alone(self, delivery: AnyDelivery, outcome: Outcome) -> None:
        self.enter(delivery)
        task = delivery.task
        match outcome:
            case Rejected(reason, error):
                text = f" ({readable_error(None, error)})" if error and not self._hide_texts else ""
                _log.warning("task %s of %s was rejected: %s%s", task.id, task.key, reason, text)
            case RetryLater(_, error):
                text = "" if self._hide_texts else f": {readable_error(None, error)}"
                message = "task %s of %s asks for a retry (attempt %d)%s"
                _log.info(message, task.id, task.key, delivery.attempt, text)
            case Snoozed(delay):
                _log.info("task %s of %s is put off by %g s", task.id, task.key, delay)

    def exc_info(self, error: BaseException, text: str | None = None) -> ExcInfo:
        """Return an exception as a log record has it; ``text`` is its traceback, as it is stored."""
        frames = without_own(error.__traceback__)
        if self._hide_texts:
            error, text = _without_text(error, set()), None
        info = ExcInfo((type(error), error, frames))
        if text is not None and is_whole(text):
            info.text = text.removesuffix("\n")
        return info


class ExcInfo(tuple[type[BaseException], BaseException, TracebackType | None]):  # noqa: SLOT001 - it has an attribute
    """An exception as a log record has it, and the text of its traceback, so that no formatter has to render it."""

    text: str | None = None


class _Attributes(dict[str, Any]):
    """The attributes of a record, in which a field of the application replaces the task's field of the same name.

    `logging.Logger.makeRecord` raises `KeyError` for ``extra={"key": ...}`` if the record has such an attribute, so the
    task's fields are hidden from that method.
    """

    def __contains__(self, name: object) -> bool:
        if name in FIELDS and sys._getframe(1).f_code is _MAKE_RECORD:  # noqa: SLF001 - documented for such use
            return False
        return super().__contains__(name)


class _RecordFactory:
    """A factory of log records that adds the fields of the current task to the records of another factory."""

    def __init__(self, factory: Any) -> None:
        self._factory = factory

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._factory(*args, **kwargs)
        if call := _current.get():
            record.__dict__ = _Attributes(record.__dict__, **_fields(call))
        return record


def _fields(call: _Call) -> dict[str, Any]:
    worker_id, delivery, number = call
    task = delivery.task
    if number > 1:
        return {"key": task.key, "worker_id": worker_id}
    values = (task.id, task.key, delivery.attempt, task.tenant, worker_id)
    return dict(zip(FIELDS, values, strict=True))


def _structlog_binder() -> Callable[..., object] | Literal[False]:
    """Return the function that adds fields to the events of structlog, or False if it is not needed.

    It is needed if the application uses structlog, unless events become records by the configuration of `set_up_logs`.
    """
    if "structlog" not in sys.modules:
        return False
    from structlog.contextvars import bind_contextvars  # noqa: PLC0415 - only if the application uses it

    from taskqueue_core.logs import structlog_is_set_up  # noqa: PLC0415 - as above

    return not structlog_is_set_up() and bind_contextvars


def without_own(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that call handlers, unless it has no others."""
    every = []
    frame = frames
    while frame is not None:
        every.append(frame)
        frame = frame.tb_next
    kept: TracebackType | None = None
    for frame in reversed(every):
        if not frame.tb_frame.f_code.co_filename.startswith(_OWN_FOLDERS):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept or frames


def _without_text(error: BaseException, seen: set[int]) -> BaseException:
    """Return an exception with the name, the frames and the causes of another one, but without a text."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    hidden: BaseException = type(kind.__name__, (BaseException,), names)()
    hidden.__traceback__ = error.__traceback__
    hidden.__suppress_context__ = error.__suppress_context__
    seen.add(id(error))
    for name in ("__cause__", "__context__"):
        reason = getattr(error, name)
        if reason is not None and id(reason) not in seen and len(seen) < _MOST_CAUSES:
            suppressed = hidden.__suppress_context__
            setattr(hidden, name, _without_text(reason, seen))
            hidden.__suppress_context__ = suppressed  # setting a cause changes it
    return hidden
