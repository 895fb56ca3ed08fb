"""What is due: which instants of a schedule are published now, and which are skipped."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from taskqueue_core.schedules.schedule import Schedule, next_instant
from taskqueue_core.schedules.when import Every, start_of_newest

__all__ = ["CATCH_UP", "Plan", "SkipReason", "Skipped", "plan"]

CATCH_UP = 1000
"""maximum number of missed instants that are made up for, and that are counted one by one"""
_PUNCTUAL = 60.0
"""seconds within which an instant is not missed: a server may restart in this time"""


class SkipReason(StrEnum):
    """Why nothing was published for an instant."""

    REFUSED = "refused"
    """the queue refused its task when it was tried; what is recorded is the reason that the queue gave"""
    LATE = "late"
    """it was more than `Schedule.late` seconds old"""
    MISSED = "missed"
    """no server or worker ran at that time, and `Schedule.catch_up` does not make up for it"""
    TOO_MANY = "too_many"
    """more than 1,000 instants were missed; the oldest ones are skipped"""
    OVERLAP = "overlap"
    """the task of an earlier instant had not ended"""


class Skipped(msgspec.Struct, frozen=True, omit_defaults=True):
    """Instants for which nothing was published, and why: those from ``first`` on that are earlier than ``before``."""

    reason: SkipReason
    count: int
    """number of instants"""
    first: float
    before: float
    at_least: bool = False
    """whether ``count`` is a lower bound, because there are too many to count"""


class Plan(msgspec.Struct, frozen=True):
    """What a schedule does when its time has come: publish, skip, and move on to ``next_at``."""

    instants: tuple[float, ...]
    """the instants to publish a task for, oldest first, at most `CATCH_UP`"""
    next_at: float | None
    """the first instant after now; ``None`` if there is none"""
    skipped: tuple[Skipped, ...] = ()
    """what is skipped; all of it is earlier than ``instants``"""


def plan(
    schedule: Schedule, next_at: float, now: float, refused: float | None = None
) -> Plan | None:
    """Return what is due at the time ``now``; ``None`` if nothing is. ``next_at`` is an instant of the schedule.

    ``refused``: the last instant whose task the queue has refused, if it is not earlier than ``next_at``.

    There is more than one instant to publish for only if several missed instants are made up for. This takes a bounded
    time, however many instants were missed.
    """
    if next_at > now:
        return None
    oldest = now - schedule.late
    following = next_instant(schedule, next_at)
    if next_at > max(oldest, now - _PUNCTUAL) and (following is None or following > now):
        return Plan((next_at,), following)  # as usual
    due = _instants(schedule, next_at, now, CATCH_UP + 1)
    if len(due) > CATCH_UP:
        due = _newest(schedule, max(next_at, oldest), now)
    fresh = [instant for instant in due if instant > oldest]
    if schedule.catch_up == "all":
        fire = fresh[-CATCH_UP:]
    elif schedule.catch_up == "last":
        fire = fresh[-1:]
    else:
        fire = [instant for instant in fresh[-1:] if now - instant <= _PUNCTUAL]
    after = next_instant(schedule, now)
    end = fire[0] if fire else after
    if end is None:
        end = min(now + 0.001, math.inf if schedule.ends is None else schedule.ends.timestamp())
    skipped = _skipped(schedule, next_at, refused, oldest, end)
    return Plan(tuple(fire), after, skipped)


def _instants(schedule: Schedule, first: float, last: float, most: float) -> list[float]:
    """Return up to ``most`` instants from ``first``, which is one, to ``last``."""
    found: list[float] = []
    instant: float | None = first
    while instant is not None and instant <= last and len(found) < most:
        found.append(instant)
        instant = next_instant(schedule, instant)
    return found


def _newest(schedule: Schedule, oldest: float, now: float) -> list[float]:
    """Return the newest instants from ``oldest`` to ``now``, at least `CATCH_UP` of them if there are so many."""
    start = max(oldest, start_of_newest(schedule.when, now, CATCH_UP))
    first = next_instant(schedule, start - 0.001)
    return [] if first is None else _instants(schedule, first, now, math.inf)


def _skipped(
    schedule: Schedule, first: float, refused: float | None, oldest: float, end: float
) -> tuple[Skipped, ...]:
    """Return what is skipped of the instants from ``first`` to before ``end``, and why.

    Those up to ``refused`` were refused, others up to ``oldest`` are late, and the rest is skipped for another reason.
    """

    def after(last: float | None) -> float:
        if last is None or last < first:
            return first
        instant = next_instant(schedule, last)
        return end if instant is None else min(instant, end)

    tried, fresh = after(refused), after(oldest)
    other = SkipReason.TOO_MANY if schedule.catch_up == "all" else SkipReason.MISSED
    groups = (
        (SkipReason.REFUSED, first, tried),
        (SkipReason.LATE, tried, fresh),
        (other, max(tried, fresh), end),
    )
    return tuple(_group(schedule, *group) for group in groups if group[1] < group[2])


def _group(schedule: Schedule, reason: SkipReason, first: float, before: float) -> Skipped:
    if isinstance(schedule.when, Every):
        count = math.ceil(round((before - first) / schedule.when.seconds, 6))
        return Skipped(reason, count, first, before)
    count = len(_instants(schedule, first, before - 0.001, CATCH_UP + 1))
    return Skipped(reason, min(count, CATCH_UP), first, before, count > CATCH_UP)
