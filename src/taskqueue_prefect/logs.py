"""The package's own log lines, where Prefect writes its own."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

__all__ = ["LOG", "forward_logs"]

_USUAL = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class _Log(logging.LoggerAdapter[logging.Logger]):
    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        # Where nobody reads what it prints, as with ``--background``, Prefect's console ends the process.
        with contextlib.suppress(SystemExit):
            super().log(level, msg, *args, **more)


LOG = _Log(logging.getLogger("prefect.taskqueue"))
"""where everything of this package is told"""


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
        if LOG.isEnabledFor(record.levelno):
            text = f"{record.getMessage()}: {more}" if more else record.getMessage()
            LOG.log(record.levelno, "%s", text, exc_info=record.exc_info)
