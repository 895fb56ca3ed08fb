"""Structured logs: one line per event. Extra fields that `FIELDS` does not list are dropped, to protect secrets."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog

from taskqueue_core.limits import escape_controls

FIELDS = frozenset(
    {
        "code",
        "configurations",
        "connection_id",
        "connections",
        "endpoints",
        "expired",
        "faults",
        "identity",
        "job_id",
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
        "url",
        "worker_id",
    }
)
"""names of the fields that the caller of a logger may add to a line; none is for a payload, a token or a task's text"""
Form = Literal["auto", "text", "json"]
LINES = 50
"""maximum number of lines of one kind in `WINDOW_SECONDS` that clients without a token can cause"""
WINDOW_SECONDS = 10.0
_CAUSED_BY_STRANGERS = (
    "asyncio",
    "taskqueue.server.access",
    "taskqueue.server.connections",
    "taskqueue.server.http",
    "uvicorn.error",
)
_HEAD = ["timestamp", "level", "logger", "event"]
_TEXT = 200
_encode = json.JSONEncoder(default=str).encode


def set_up_logs(
    stream: TextIO | None = None, level: int = logging.INFO, form: Form = "auto"
) -> None:
    """Write logs of this package and of uvicorn to ``stream`` (default: stderr), unless logging is already configured.

    ``form`` is ``json`` (one JSON object per line), ``text`` (key=value pairs), or ``auto`` (short lines on a terminal,
    otherwise key=value pairs).
    """
    if logging.getLogger().handlers or logging.getLogger("taskqueue").handlers:
        return
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    for_people = form == "auto" and stream.isatty()
    handler.setFormatter(formatter(for_people=for_people, as_json=form == "json"))
    # Below WARNING, uvicorn logs URLs as the client sent them, including tokens in the query.
    for name, lowest in (("taskqueue", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(lowest)
        logger.propagate = False


class LineLimit(logging.Filter):
    """Drops lines after the first `LINES` of one kind, until `report` writes how many were left out.

    Lines of one kind have the same logger, level, message and status or close code. Lines with the field ``identity``
    are always kept, because the client has authenticated.
    """

    def __init__(self) -> None:
        """Create a limit that has counted nothing."""
        super().__init__()
        self._counts: Counter[tuple[str, int, str, int | None]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a line, and return whether to keep it."""
        if hasattr(record, "identity"):
            return True
        code = getattr(record, "status", getattr(record, "code", None))
        kind = (record.name, record.levelno, str(record.msg), code)
        self._counts[kind] += 1
        return self._counts[kind] <= LINES

    def report(self) -> None:
        """Write how many lines of each kind were left out, and start to count again."""
        counts, self._counts = self._counts, Counter()
        for (name, level, message, code), count in counts.items():
            if count > LINES:
                fields = {"reason": message, "left_out": count - LINES}
                fields |= {} if code is None else {"status": code}
                logging.getLogger(name).log(level, "similar lines were left out", extra=fields)


async def limit_lines(*, authenticates: bool) -> None:
    """Limit what clients without a token can add to the log, until cancelled.

    If the server ``authenticates`` clients, its access log is limited too.
    """
    limit = LineLimit()
    names = (*_CAUSED_BY_STRANGERS, *(["taskqueue.access"] if authenticates else []))
    for name in names:
        logging.getLogger(name).addFilter(limit)
    try:
        while True:
            await asyncio.sleep(WINDOW_SECONDS)
            limit.report()
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(limit)
        limit.report()


def set_level(name: str) -> None:
    """Set the lowest level that this package logs, such as ``info``. Do nothing if its logger has no handler."""
    own = logging.getLogger("taskqueue")
    if own.handlers:
        own.setLevel(logging.getLevelNamesMapping()[name.upper()])


def formatter(*, for_people: bool = False, as_json: bool = False) -> logging.Formatter:
    """Return a formatter that writes time, level, logger, message, the fields in `FIELDS`, and a traceback if any.

    The default form is key=value pairs. ``as_json`` selects JSON objects; ``for_people`` selects short lines for a
    terminal, without the logger.
    """
    pairs = structlog.processors.KeyValueRenderer(key_order=_HEAD, drop_missing=True)
    machine = _json if as_json else pairs
    time = "%H:%M:%S" if for_people else "iso"
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(allow=sorted(FIELDS)),
            structlog.processors.TimeStamper(fmt=time, utc=not for_people),
            structlog.processors.format_exc_info,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            _escape,
            _in_few_words if for_people else machine,
        ],
    )


def _in_few_words(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    head = f"{event.pop('timestamp')} {event.pop('level'):<7} {event.pop('event')}"
    del event["logger"]
    return "  ".join((head, *(f"{name}={value}" for name, value in event.items())))


def _json(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    head = {name: event.pop(name) for name in _HEAD if name in event}
    return _encode({**head, **event})


def _escape(
    _logger: object, _name: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, str):
            text = value if name in {"exception", "event"} else value[:_TEXT]
            event[name] = escape_controls(text)
    return event
