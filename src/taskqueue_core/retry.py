"""Pure functions that decide how to settle a delivery, given the outcome of its handler. Backends do not use them.

::

    Success            -> Ack
    HandBack           -> Redeliver         not a failure: the attempt number does not change
    RetryLater, Failed -> ScheduleRetry     if attempts remain
                       -> Bury              otherwise: the task becomes a dead letter
    Snoozed            -> ScheduleRetry     counts no attempt
    Rejected           -> Bury
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Annotated

import msgspec
from pydantic import Field

from taskqueue_core.limits import LIMITS, check_duration
from taskqueue_core.policy_model import PolicyModel
from taskqueue_core.rate_limit import Number, Whole
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
    "Snoozed",
    "Success",
    "Verb",
    "decide",
]

EXHAUSTED = "max_retries_exceeded"
"""reason stored with a dead letter whose task has used all its attempts"""

_Delay = Annotated[Number, Field(ge=0, le=7 * 86_400)]


class RetryPolicy(PolicyModel):
    """The delays between a task's attempts, and the maximum number of attempts.

    Before the n-th retry, the task waits ``min(base * factor**(n-1), cap)`` seconds, plus or minus the jitter. With
    ``delays``, it waits the n-th of them instead, or the last one if there are fewer.

    >>> doubling = RetryPolicy(max_attempts=8, base=2, cap=600)  # 2, 4, 8 ... up to 600 s
    >>> listed = RetryPolicy(delays=(5, 60, 900))  # 5 s, 60 s, then 900 s again and again
    """

    base: Number = Field(default=1.0, ge=0, le=86_400)
    """seconds before the first retry, before the jitter is applied"""
    cap: Number = Field(default=30.0, ge=0, le=7 * 86_400)
    """maximum delay in seconds, before the jitter is applied"""
    jitter: Number = Field(default=0.1, ge=0, le=1)
    """maximum random change of the delay, as a share of it: 0.1 means plus or minus 10 %"""
    max_attempts: Whole = Field(default=50, ge=1, le=1000)
    """maximum number of attempts, including the first; if all of them fail, the task becomes a dead letter"""
    factor: Number = Field(default=2.0, ge=1, le=100)
    """number by which the delay is multiplied after each retry; 1 means that all delays are ``base``"""
    delays: tuple[_Delay, ...] = Field(default=(), max_length=100)
    """delays in seconds before the first, second ... retry, instead of the formula; the last one repeats"""

    def delay(self, attempt: int, uniform: Callable[[], float] = random.random) -> float:
        """Return the delay in seconds after attempt number ``attempt``. ``uniform`` returns a number from 0 to 1."""
        if self.delays:
            wait = self.delays[min(attempt, len(self.delays)) - 1]
        else:
            try:
                growth = self.factor ** (attempt - 1)
            except OverflowError:
                growth = sys.float_info.max
            wait = min(self.base * growth, self.cap)
        return wait * (1 + self.jitter * (2 * uniform() - 1))


class Success(msgspec.Struct, frozen=True):
    """The outcome of a handler that executed the task."""

    result: bytes | None = None


class HandBack(msgspec.Struct, frozen=True):
    """The outcome of a task that was not finished, for a reason outside the task. ``lost``: its consumer crashed."""

    lost: bool = False


class RetryLater(msgspec.Struct, frozen=True):
    """The outcome of a handler that requested another attempt, after ``delay`` seconds or the policy's delay."""

    delay: float | None = None
    error: str = "retry requested"
    traceback: str | None = None

    def __post_init__(self) -> None:
        if self.delay is not None:
            check_duration("delay", self.delay)


class Snoozed(msgspec.Struct, frozen=True):
    """The outcome of a handler that asked to run the task again after ``delay`` seconds, which counts no attempt."""

    delay: float

    def __post_init__(self) -> None:
        check_duration("delay", self.delay)


class Failed(msgspec.Struct, frozen=True):
    """The outcome of a failed attempt."""

    error: str
    traceback: str | None = None


class Rejected(msgspec.Struct, frozen=True):
    """The outcome of a task that must not be tried again, because no attempt can succeed."""

    reason: str
    error: str | None = None
    traceback: str | None = None


Outcome = Success | HandBack | RetryLater | Snoozed | Failed | Rejected


class Ack(msgspec.Struct, frozen=True):
    """The decision to end the delivery as executed."""

    result: bytes | None


class Redeliver(msgspec.Struct, frozen=True):
    """The decision to release the delivery."""

    lost: bool


class ScheduleRetry(msgspec.Struct, frozen=True):
    """The decision to schedule the next attempt, ``delay`` seconds from now. ``free``: this one does not count."""

    delay: float
    error: str | None
    free: bool = False
    traceback: str | None = None


class Bury(msgspec.Struct, frozen=True):
    """The decision to make the task a dead letter."""

    reason: str
    error: str | None
    traceback: str | None = None


Verb = Ack | Redeliver | ScheduleRetry | Bury


def decide(
    outcome: Outcome,
    delivery: Delivery,
    policy: RetryPolicy,
    uniform: Callable[[], float] = random.random,
) -> Verb:
    """Return how to settle a delivery after an outcome. ``uniform`` returns a random number from 0 to 1, for jitter."""
    match outcome:
        case Success(result):
            return Ack(result)
        case RetryLater() | Failed():
            return _next_retry(delivery, policy, outcome, uniform)
        case HandBack(lost):
            return Redeliver(lost)
        case Rejected(reason, error, traceback):
            return Bury(reason, error, traceback)
        case Snoozed(delay):
            return _next_snooze(delivery, delay)


def _next_snooze(delivery: Delivery, delay: float) -> Verb:
    if delivery.attempt >= LIMITS.attempts:
        return Bury(EXHAUSTED, f"a task may have at most {LIMITS.attempts} attempts and snoozes")
    return ScheduleRetry(delay, None, free=True)


def _next_retry(
    delivery: Delivery,
    policy: RetryPolicy,
    outcome: RetryLater | Failed,
    uniform: Callable[[], float],
) -> Verb:
    spent = delivery.attempt - delivery.prior
    allowed = delivery.task.max_attempts or policy.max_attempts
    if spent >= allowed or delivery.attempt >= LIMITS.attempts:
        return Bury(EXHAUSTED, outcome.error, outcome.traceback)
    delay = outcome.delay if isinstance(outcome, RetryLater) else None
    if delay is None:
        delay = policy.delay(spent, uniform)
    return ScheduleRetry(delay, outcome.error, traceback=outcome.traceback)
