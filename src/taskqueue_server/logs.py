"""A limit on the log lines that clients without a token can cause."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

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
