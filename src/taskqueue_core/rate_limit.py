"""Limits on the flow through a queue: what an operator sets, and the arithmetic that every backend shares.

Every delivery counts, a redelivery too. Nothing here reads a clock: times are the store's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from taskqueue_core.errors import InvalidInput

_MOST = 1000
"""the largest capacity that follows from endpoints: a task behind more than that would wait without success"""
_DUST = 1e-6
"""of a token: what floating point may leave out"""


class IntervalUnit(StrEnum):
    """The unit of a rate limit's interval."""

    SECONDS = "SECONDS"
    MINUTES = "MINUTES"
    HOURS = "HOURS"

    @property
    def seconds(self) -> int:
        """Return how many seconds it has."""
        return _SECONDS[self]


_SECONDS = {IntervalUnit.SECONDS: 1, IntervalUnit.MINUTES: 60, IntervalUnit.HOURS: 3600}


class RateLimit(BaseModel):
    """A token bucket. Each delivery takes a token; an interval fills the whole bucket, evenly; it starts full.

    So a burst of ``max_tokens`` is allowed: 10 tokens in 10 seconds are not 1 token in 1 second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(ge=1, le=1_000_000_000)
    interval: int = Field(default=1, ge=1, le=1_000_000)
    interval_unit: IntervalUnit = IntervalUnit.SECONDS

    @property
    def period(self) -> float:
        """Return the seconds in which an empty bucket fills."""
        return float(self.interval * self.interval_unit.seconds)


class Bucket(msgspec.Struct):
    """The tokens of one queue: so many at a time."""

    tokens: float
    at: float

    def fill(self, limit: RateLimit, now: float) -> int:
        """Bring it up to date. Return how many whole tokens it has."""
        # the store's clock may have gone back: what it gave once it does not give twice
        if now > self.at:
            if self.tokens < limit.max_tokens:
                self.tokens += (now - self.at) * limit.max_tokens / limit.period
            self.at = now
        self.tokens = min(self.tokens, float(limit.max_tokens))
        return math.floor(self.tokens + _DUST)

    def next_at(self, limit: RateLimit) -> float:
        """Return when it has a whole token, having been brought up to date: rounded up, so that it does then."""
        wait = max(0.0, 1 - self.tokens) * limit.period / limit.max_tokens
        at = self.at + wait
        return at if at - self.at >= wait else math.nextafter(at, math.inf)


def bucket_after(
    bucket: Bucket | None, before: RateLimit | None, limit: RateLimit | None, now: float
) -> Bucket | None:
    """Return the tokens of a queue whose limit was ``before`` and is ``limit`` now: those it had, or a full bucket."""
    if limit is None:
        return None
    if bucket is None or before is None:
        return Bucket(tokens=float(limit.max_tokens), at=now)
    bucket.fill(before, now)  # what has been saved up until now counts at the old rate
    return bucket


def capacity_for(concurrency: Iterable[int], *factor: int) -> int:
    """Return the capacity of a queue in front of endpoints: so many tasks for each that they can run at once.

    ``concurrency`` has the number of each endpoint. The largest ``factor`` counts; usually one of two is set, for the
    queue or for where it runs, and the other is 0. The answer is between 0 and 1000: 0 where nothing can run, or no
    factor is set. Raises `InvalidInput` for a negative number.
    """
    together = sum(_checked("concurrency", number) for number in concurrency)
    largest = max((_checked("factor", number) for number in factor), default=0)
    return min(largest * together, _MOST)


def intake_for(capacity: int) -> dict[str, Any]:
    """Return the settings that say ``capacity``, which may be 0: the intake is paused then.

    A queue's own ``capacity`` is at least 1, so that a full one gets room again with the next delivery; with 0
    nothing would ever be accepted, and publishers get the other reason. The caller that applies these owns both
    settings: a capacity above 0 resumes the intake.
    """
    return {"capacity": max(1, _checked("capacity", capacity)), "intake_paused": capacity == 0}


def _checked(field: str, number: int) -> int:
    if type(number) is not int or number < 0:
        kind = "int out of range" if type(number) is int else type(number).__name__
        raise InvalidInput(field, kind, "a whole number, 0 or more")
    return number
