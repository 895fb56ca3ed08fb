"""When a schedule fires: cron expressions and intervals, and the instants that follow from them.

An instant is a time in Unix seconds, to the millisecond. It depends on the schedule alone, so every process computes
the same one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from itertools import islice
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec
from cronsim import CronSim, CronSimError

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS, check_duration, check_time, kind_of

__all__ = ["Cron", "Every", "When", "checked_datetime", "following", "start_of_newest", "text_of"]

_NAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_FIELDS = "minute, hour, day of month, month, day of week"
_EXPRESSION = f"five fields ({_FIELDS}), such as '0 9 * * MON-FRI', or one of {', '.join(_NAMES)}"
_ZONE = "a name in the time zone database of this machine, such as 'Europe/Berlin'"
_LONGEST = 1000
_DAY = 86_400
_END = 253_402_300_800  # the start of the year 10000, the end of Python's datetime


class Cron(msgspec.Struct, frozen=True, tag="cron", omit_defaults=True):
    """The times that a cron expression names, in a time zone.

    The expression has the five fields of Debian's cron, or is a name such as ``@daily``. A fixed time that a change of
    the clock skips is moved to the end of the gap; one that occurs twice counts the first time. Expressions whose
    minute or hour begins with ``*`` follow the time that passes. Raises `InvalidInput`, which names ``expression`` or
    ``timezone``; a time zone must be known on the machine that checks it.

    >>> when = Cron("0 9 * * MON-FRI", timezone="Europe/Berlin")
    """

    expression: str
    timezone: str = "UTC"
    """name in the IANA time zone database"""

    def __post_init__(self) -> None:
        _check_text("timezone", self.timezone, LIMITS.name, _ZONE)
        _check_text("expression", self.expression, _LONGEST, _EXPRESSION)
        if not _occurs(self.expression, _zone(self.timezone)):
            raise InvalidInput(
                "expression",
                "one that matches no day in 50 years",
                "an expression that matches a day",
            )


class Every(msgspec.Struct, frozen=True, tag="every", omit_defaults=True):
    """A fixed interval in seconds: at least 1, and a whole number of milliseconds.

    The instants are multiples of the interval since 1970-01-01 00:00 UTC. With ``since``, a datetime with a time zone,
    that time is the first instant. They never drift. Raises `InvalidInput`, which names ``seconds`` or ``since``.

    >>> when = Every(900)
    """

    seconds: float
    since: datetime | None = None

    def __post_init__(self) -> None:
        check_duration("seconds", self.seconds)
        if self.seconds < 1 or round(self.seconds, 3) != self.seconds:
            raise InvalidInput(
                "seconds",
                "a number that is not allowed",
                "a number of seconds from 1, with at most three decimal places",
            )
        checked_datetime("since", self.since)


When = Cron | Every


def following(when: When, after: float) -> float | None:
    """Return the first instant later than ``after``; ``None`` if there is none up to the year 9999."""
    if isinstance(when, Cron):
        return _following_cron(when.expression, when.timezone, after)
    interval = round(when.seconds * 1000)
    origin = 0 if when.since is None else _milliseconds(when.since.timestamp())
    steps = (_milliseconds(after) - origin) // interval + 1
    if when.since is not None:
        steps = max(0, steps)
    instant = (origin + steps * interval) / 1000
    return instant if instant < _END else None


def start_of_newest(when: When, until: float, count: int) -> float:
    """Return a time from which on there are at least ``count`` instants up to ``until``, if there are so many at all.

    There may be more: up to a day's instants.
    """
    if isinstance(when, Every):
        return until - count * when.seconds
    # Backwards, an hour that a change of the clock repeats or skips may come out differently, so a day is added.
    moments = _instants(when.expression, _zone(when.timezone), until, reverse=True)
    start = next(islice(moments, count, None), None)
    return 0.0 if start is None else max(0.0, start - _DAY)


@lru_cache(maxsize=256)  # the instants of many schedules are the same
def text_of(instant: float) -> str:
    """Return an instant in ISO 8601, in UTC: ``2026-03-29T01:00:00Z``."""
    moment = datetime.fromtimestamp(round(instant * 1000) // 1000, UTC).replace(tzinfo=None)
    thousandths = round(instant * 1000) % 1000
    return f"{moment.isoformat()}.{thousandths:03}Z" if thousandths else f"{moment.isoformat()}Z"


def checked_datetime(field: str, value: object) -> float | None:
    """Return a time in Unix seconds; ``None`` if it is not given. Raises `InvalidInput`."""
    if value is None:
        return None
    if not isinstance(value, datetime) or value.tzinfo is None:
        got = (
            "a datetime without a time zone"
            if isinstance(value, datetime)
            else type(value).__name__
        )
        raise InvalidInput(field, got, "a datetime with a time zone")
    check_time(field, value.timestamp())
    return value.timestamp()


def _milliseconds(at: float) -> int:
    """Return the whole milliseconds up to a time, without the error of a multiplication."""
    passed = round(at * 1000)
    return passed if passed / 1000 <= at else passed - 1


def _check_text(field: str, value: object, longest: int, allowed: str) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= longest:
        raise InvalidInput(field, kind_of(value), allowed)


@lru_cache(maxsize=4096)
def _following_cron(expression: str, timezone: str, after: float) -> float | None:
    # From the full second on, because a datetime would round the rest, perhaps up to the instant that comes next.
    for instant in _instants(expression, _zone(timezone), math.floor(after)):
        if instant > after:
            return instant
    return None


@lru_cache(maxsize=4096)
def _occurs(expression: str, zone: tzinfo) -> bool:
    return next(_instants(expression, zone, 0.0), None) is not None


def _instants(
    expression: str, zone: tzinfo, after: float, *, reverse: bool = False
) -> Iterator[float]:
    """Yield the instants after a time, and perhaps one before it, if a change of the clock repeats an hour."""
    fields = _NAMES.get(expression.strip().lower(), expression)
    if (number := len(fields.split())) != len(_FIELDS.split(", ")):
        got = "1 field" if number == 1 else f"{number} fields"
        raise InvalidInput("expression", got, _EXPRESSION)
    if not 0 <= after < _END - _DAY:  # in some time zone, it is outside the years of a datetime
        return
    try:
        moments = CronSim(fields, datetime.fromtimestamp(after, UTC).astimezone(zone), reverse)
    except CronSimError as error:
        field = str(error).removeprefix("Bad ").replace("-", " ")
        raise InvalidInput("expression", f"an invalid {field} field", _EXPRESSION) from error
    except (AssertionError, ValueError, TypeError) as error:  # of combinations such as '1L/2'
        raise InvalidInput("expression", "an invalid field", _EXPRESSION) from error
    try:
        for moment in moments:
            yield moment.timestamp()
    except (OverflowError, ValueError):  # the end of the last year of a datetime
        return


@lru_cache(maxsize=1024)
def _zone(name: str) -> tzinfo:
    if name == "UTC":
        return UTC
    if name == "localtime":
        raise InvalidInput("timezone", "the local time of a machine", _ZONE)
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidInput("timezone", "a name that this machine does not know", _ZONE) from error
