"""Times as people write them: in commands, in forms, and in the query of a URL."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from taskqueue_core.errors import InvalidInput

ZONED = "ISO 8601 with a time zone, such as 2026-03-01T00:00:00Z, or Unix seconds"
"""the forms of a time, for help texts"""
RECENT = "ISO 8601, such as 2026-11-30T14:05 (UTC by default), Unix seconds, or how long ago: 90s, 15m, -1h, -7d"
"""the forms of a time for which `parse_time` has ``now``"""
_AGO = re.compile(r"-?([0-9]{1,9})([smhd])")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SECONDS = re.compile(r"[0-9]{9,11}|[0-9]{1,11}\.[0-9]{1,9}")


def parse_time(field: str, text: str, now: float | None = None) -> float:
    """Return a time in Unix seconds; see `parse_moment`.

    >>> parse_time("since", "2026-11-30T14:05Z")
    1796047500.0
    >>> parse_time("since", "-1h", now=1796047500.0)
    1796043900.0
    """
    return parse_moment(field, text, now).timestamp()


def parse_moment(field: str, text: str, now: float | None = None) -> datetime:
    """Return a time in the time zone in which it is given. Raises `InvalidInput` for ``field``.

    The text is a time in ISO 8601, or Unix seconds. With ``now``, it may also say how long ago the time was, and a time
    without a time zone is UTC. Without ``now``, a time zone is required.

    >>> parse_moment("starts", "2026-11-30T14:05+01:00").isoformat()
    '2026-11-30T14:05:00+01:00'
    """
    if now is not None and (ago := _AGO.fullmatch(text)):
        return datetime.fromtimestamp(max(0.0, now - int(ago[1]) * _UNITS[ago[2]]), UTC)
    if _SECONDS.fullmatch(text):
        return datetime.fromtimestamp(float(text), UTC)
    forms = ZONED if now is None else RECENT
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(field, f"text of length {len(text)} that is no time", forms) from None
    if moment.tzinfo is not None:
        return moment
    if now is None:
        raise InvalidInput(field, "a time without a time zone", forms)
    return moment.replace(tzinfo=UTC)
