"""The package's own log lines, where Prefect writes its own."""

from __future__ import annotations

import logging

__all__ = ["forward_logs"]

_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def forward_logs() -> None:
    """Have what ``taskqueue`` says come out of Prefect's logs, with its fields in the text. Idempotent."""
    ours = logging.getLogger("taskqueue")
    if not any(isinstance(handler, _Forward) for handler in ours.handlers):
        ours.addHandler(_Forward())
        ours.propagate = False
        ours.setLevel(logging.INFO)


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in record.__dict__.items() if name not in _USUAL}
        more = " ".join(f"{name}={value}" for name, value in fields.items())
        target = logging.getLogger("prefect.taskqueue")
        if target.isEnabledFor(record.levelno):
            text = f"{record.getMessage()}: {more}" if more else record.getMessage()
            target.log(record.levelno, "%s", text, exc_info=record.exc_info)
