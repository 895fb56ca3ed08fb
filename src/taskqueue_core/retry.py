"""Retry policy: from a handler's outcome to one verb, purely. Backends know none of this.

::

    Success            -> Ack
    HandBack           -> Redeliver         not a failure: the attempt stays
    RetryLater, Failed -> ScheduleRetry     while attempts are left, else
                       -> Bury              to the dead letters, as is
    Rejected           -> Bury
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from taskqueue_core.limits import check_duration
from taskqueue_core.tasks import Delivery

__all__ = [
    "EXHAUSTED",
    "Ack",
    "Bury",
    "Failed",
    "HandBack",
    "Outcome",
    "Redeliver",
    "Rejected",
    "RetryLater",
    "RetryPolicy",
    "ScheduleRetry",
    "Success",
    "Verb",
    "decide",
]

EXHAUSTED = "max_retries_exceeded"
"""the reason of a dead letter whose attempts are used up"""


class RetryPolicy(BaseModel):
    """When to try again, and how often.

    The n-th retry waits ``min(base * 2**(n-1), cap)`` seconds, give or take jitter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: float = Field(default=1.0, ge=0, le=86_400, allow_inf_nan=False)
    """seconds before the first retry"""
    cap: float = Field(default=30.0, ge=0, le=7 * 86_400, allow_inf_nan=False)
    """the longest wait, before jitter"""
    jitter: float = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    """the wait varies evenly within this share of itself, either way"""
    max_attempts: int = Field(default=50, ge=1, le=1000)
    """attempts in all before a task goes to the dead letters"""

    def delay(self, attempt: int, uniform: Callable[[], float] = random.random) -> float:
        """Return the seconds to wait after failed attempt number ``attempt`` (from 1). ``uniform`` gives 0 <= x < 1."""
        wait = min(self.base * 2.0 ** min(attempt - 1, 900), self.cap)  # 2.0 ** 1024 would overflow
        return wait * (1 + self.jitter * (2 * uniform() - 1))


class Success(msgspec.Struct, frozen=True):
    """Executed."""

    result: bytes | None = None


class HandBack(msgspec.Struct, frozen=True):
    """Not executed, by no fault of the task."""

    lost: bool = False


class RetryLater(msgspec.Struct, frozen=True):
    """The handler asks for another attempt, after ``delay`` seconds or when the policy says."""

    delay: float | None = None
    error: str = "retry requested"

    def __post_init__(self) -> None:
        """Check the delay. Raises `InvalidInput`."""
        if self.delay is not None:
            check_duration("delay", self.delay)


class Failed(msgspec.Struct, frozen=True):
    """The attempt failed."""

    error: str


class Rejected(msgspec.Struct, frozen=True):
    """No attempt can succeed."""

    reason: str
    error: str | None = None


Outcome = Success | HandBack | RetryLater | Failed | Rejected


class Ack(msgspec.Struct, frozen=True):
    """End as done."""

    result: bytes | None


class Redeliver(msgspec.Struct, frozen=True):
    """Release the delivery."""

    lost: bool


class ScheduleRetry(msgspec.Struct, frozen=True):
    """Try again ``delay`` seconds from now."""

    delay: float
    error: str


class Bury(msgspec.Struct, frozen=True):
    """Put among the dead letters."""

    reason: str
    error: str | None


Verb = Ack | Redeliver | ScheduleRetry | Bury


def decide(
    outcome: Outcome,
    delivery: Delivery,
    policy: RetryPolicy,
    uniform: Callable[[], float] = random.random,
) -> Verb:
    """Turn an outcome into the one verb that settles the delivery."""
    match outcome:
        case Success(result):
            return Ack(result)
        case HandBack(lost):
            return Redeliver(lost)
        case Rejected(reason, error):
            return Bury(reason, error)
        case RetryLater(delay, error):
            return _next_retry(delivery, policy, error, uniform, delay)
        case Failed(error):
            return _next_retry(delivery, policy, error, uniform, None)


def _next_retry(
    delivery: Delivery,
    policy: RetryPolicy,
    error: str,
    uniform: Callable[[], float],
    delay: float | None,
) -> Verb:
    spent = delivery.attempt - delivery.prior
    if spent >= (delivery.task.max_attempts or policy.max_attempts):
        return Bury(EXHAUSTED, error)
    return ScheduleRetry(policy.delay(spent, uniform) if delay is None else delay, error)
