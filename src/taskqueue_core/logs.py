"""Structured logs: one line per event.

The loggers of this project write only the fields in `FIELDS`, to protect secrets. Fields of an application are written
as they are.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from taskqueue_core.limits import escape_controls

FIELDS = frozenset(
    {
        "action",
        "attempt",
        "code",
        "configurations",
        "connection_id",
        "connections",
        "details",
        "endpoints",
        "expired",
        "faults",
        "identity",
        "job_id",
        "key",
        "keys",
        "leases",
        "left_out",
        "method",
        "model",
        "path",
        "peer",
        "pid",
        "processes",
        "queue",
        "queues",
        "reason",
        "recovered",
        "seconds",
        "server",
        "settings",
        "status",
        "task_id",
        "tasks",
        "tenant",
        "url",
        "worker_id",
    }
)
"""names of the fields that the caller of a logger may add to a line; none is for a payload, a token or a task's text"""
Form = Literal["auto", "text", "json"]
_HEAD = ["timestamp", "level", "logger", "event"]
_FIELD_LENGTH = 200
_OWN = ("taskqueue", "uvicorn")
_BELOW = ("stack_info", "exception")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "_logger", "_name"}
_TO_RECORDS: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
]
_encode = json.JSONEncoder(default=str).encode
_key_values = structlog.processors.KeyValueRenderer(key_order=_HEAD, drop_missing=True)


def set_up_logs(
    stream: TextIO | None = None,
    level: int = logging.INFO,
    form: Form = "auto",
    *,
    everything: bool = False,
) -> None:
    """Write logs of this project and of uvicorn to ``stream`` (default: stderr), unless logging is already configured.

    With ``everything``, write the logs of all loggers, and pass what is logged with structlog to them, unless the
    application configures structlog. ``form`` is ``json`` (one JSON object per line), ``text`` (key=value pairs), or
    ``auto`` (short lines on a terminal, otherwise key=value pairs).
    """
    root = logging.getLogger()
    if root.handlers or (logging.getLogger("taskqueue").handlers and not everything):
        return
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    for_people = form == "auto" and stream.isatty()
    handler.setFormatter(formatter(for_people=for_people, as_json=form == "json"))
    if everything:
        root.addHandler(handler)
        root.setLevel(level)
        set_up_structlog()
        return
    # Below WARNING, uvicorn logs URLs as the client sent them, including tokens in the query.
    for name, lowest in (("taskqueue", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(lowest)
        logger.propagate = False


def set_up_structlog() -> None:
    """Let events of structlog become log records, unless the application has configured structlog."""
    if not structlog.is_configured():
        structlog.configure(
            processors=_TO_RECORDS,
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )


def structlog_is_set_up() -> bool:
    """Return whether structlog has the configuration of `set_up_structlog`."""
    return structlog.get_config()["processors"] is _TO_RECORDS


def set_level(name: str) -> None:
    """Set the lowest level that this package logs, such as ``info``. Do nothing if its logger has no handler."""
    own = logging.getLogger("taskqueue")
    if own.handlers:
        own.setLevel(logging.getLevelNamesMapping()[name.upper()])


def formatter(*, for_people: bool = False, as_json: bool = False) -> logging.Formatter:
    """Return a formatter that writes time, level, logger, message, fields, and a traceback if any.

    The default form is key=value pairs. ``as_json`` selects JSON objects; ``for_people`` selects short lines for a
    terminal: without the names of this project's loggers, and with the lines of a traceback below, indented.
    """
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[_keep_exc_text],
        processors=[
            _Complete("%H:%M:%S" if for_people else "iso", utc=not for_people),
            _with_traceback,
            _Clean(for_people=for_people, as_json=as_json),
            _in_few_words if for_people else _json if as_json else _pairs,
        ],
    )


def _keep_exc_text(
    _logger: object, _name: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add a traceback that was formatted elsewhere, such as in a child process."""
    if event["_record"].exc_text and "exc_info" not in event:
        event["exception"] = event["_record"].exc_text
    return event


def _with_traceback(
    logger: Any, name: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add a traceback as text. A worker has already the text of a failure, because it is stored."""
    text = getattr(event.get("exc_info"), "text", None)
    if text is None:
        return structlog.processors.format_exc_info(logger, name, event)
    del event["exc_info"]
    event["exception"] = text
    return event


class _Complete:
    """A processor that adds time, level, logger and fields to the event, and removes the record from it."""

    def __init__(self, time: str, *, utc: bool) -> None:
        self._stamp = structlog.processors.TimeStamper(fmt=time, utc=utc)

    def __call__(
        self, logger: Any, name: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        record: logging.LogRecord = event.pop("_record")
        del event["_from_structlog"]
        own = record.name.partition(".")[0] in _OWN
        for field, value in sorted(vars(record).items()):
            if field in _STANDARD or (own and field not in FIELDS):
                continue
            # A structlog event has its fields already, and its own names for them win.
            event.setdefault(f"{field}_" if field in _HEAD else field, value)
        event.update(level=record.levelname.lower(), logger=record.name)
        return self._stamp(logger, name, event)


def _in_few_words(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    time, level, logger, message = (event.pop(name) for name in _HEAD)
    more = "".join(f"\n{event.pop(name)}" for name in _BELOW if name in event)
    if logger.partition(".")[0] not in _OWN:
        message = f"{logger}: {message}"
    pairs = (f"{name}={value}" for name, value in event.items())
    text = escape_controls("  ".join((f"{time} {level:<7} {message}", *pairs)))
    # A line that is indented cannot be mistaken for a record of its own.
    return text + more.replace("\n", "\n    ")


def _pairs(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    return escape_controls(_key_values(None, "", event))


def _json(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    head = {name: event.pop(name) for name in _HEAD if name in event}
    return _encode({**head, **event})


class _Clean:
    """A processor that escapes control characters, and cuts the fields of this project's loggers.

    Pairs are escaped when they are written. In both forms of text, a missing tenant is left out.
    """

    def __init__(self, *, for_people: bool, as_json: bool) -> None:
        self._escape = for_people or as_json
        self._whole = as_json

    def __call__(
        self, _logger: object, _name: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if not self._whole and event.get("tenant", "") is None:
            del event["tenant"]
        own = event["logger"].partition(".")[0] in _OWN
        for name, value in event.items():
            if isinstance(value, str):
                text = value[:_FIELD_LENGTH] if own and name in FIELDS else value
                keep = "\n" if name in _BELOW else ""
                event[name] = escape_controls(text, keep=keep) if self._escape else text
        return event
