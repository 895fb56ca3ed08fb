"""Logs: one line per event, of fields that are on a list, so that nothing else can ever get in."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

__all__ = ["FIELDS", "set_level", "set_up_logs"]

FIELDS = frozenset(
    {
        "code",
        "connection_id",
        "connections",
        "expired",
        "keys",
        "pid",
        "processes",
        "reason",
        "recovered",
        "settings",
        "url",
        "worker_id",
    }
)
"""what a log line may carry beside its message; never a payload, a token or a task's own text"""
_TEXT = 200


def set_up_logs(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Write logs of this package and its server program to ``stream`` (standard error), unless that was done before."""
    if logging.getLogger().handlers or logging.getLogger("taskqueue").handlers:
        return
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter(for_people=stream.isatty()))
    ours = logging.getLogger("taskqueue")
    ours.addHandler(handler)
    ours.setLevel(level)
    ours.propagate = False
    # Below a warning the server program logs addresses as they came, tokens in queries included.
    program = logging.getLogger("uvicorn")
    program.addHandler(handler)
    program.setLevel(logging.WARNING)
    program.propagate = False


def set_level(name: str) -> None:
    """Log from this level on, such as ``info``, if it is here that logs are written."""
    ours = logging.getLogger("taskqueue")
    if ours.handlers:
        ours.setLevel(logging.getLevelNamesMapping()[name.upper()])


def formatter(*, for_people: bool = False) -> logging.Formatter:
    """Return the formatter: time, level, logger, message and the fields on the list; ``for_people`` in few words."""
    machine = structlog.processors.KeyValueRenderer(
        key_order=["timestamp", "level", "logger", "event"], drop_missing=True
    )
    time = "%H:%M:%S" if for_people else "iso"
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(allow=FIELDS),
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


def _escape(
    _logger: object, _name: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, str):
            kept = value if name in {"exception", "event"} else value[:_TEXT]
            event[name] = "".join(c if c.isprintable() else _escaped(c) for c in kept)
    return event


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
