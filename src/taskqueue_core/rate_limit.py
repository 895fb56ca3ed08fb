"""Rate limits and capacities of queues: their settings, and the calculations that all backends share.

Every delivery counts against a rate limit, redeliveries included. Callers pass the current time on the store's clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field

from taskqueue_core.errors import InvalidInput
from taskqueue_core.policy_model import PolicyModel

_MOST = 1000
_DUST = 1e-6
"""tolerance for rounding errors, in tokens"""


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
"""annotation for a setting that is a whole number; JSON may write it as ``1`` or ``1.0``, which are the same number"""
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
"""annotation for a setting that is a number: neither text nor a truth value"""


class IntervalUnit(StrEnum):
    """The unit of a rate limit's interval."""

    SECONDS = "SECONDS"
    MINUTES = "MINUTES"
    HOURS = "HOURS"

    @property
    def seconds(self) -> int:
        """The number of seconds in the unit."""
        return {"SECONDS": 1, "MINUTES": 60, "HOURS": 3600}[self.value]


_TEXT = re.compile(r"([0-9]{1,10})/([0-9]{0,7})([smh])")
RATE_UNITS = {"s": IntervalUnit.SECONDS, "m": IntervalUnit.MINUTES, "h": IntervalUnit.HOURS}
"""units of a rate in text, such as ``100/1m``"""
RATE_EXAMPLES = "a rate, for example 100/1m, 1000/1s or 15/1h"


def rate_fields(text: str) -> dict[str, Any]:
    """Return the fields of a `RateLimit`, unchecked, for a text such as ``100/1m``. Raises `ValueError`."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"must be {RATE_EXAMPLES}")
    tokens, interval, unit = match.groups()
    return {
        "max_tokens": int(tokens),
        "interval": int(interval or 1),
        "interval_unit": RATE_UNITS[unit],
    }


class RateLimit(PolicyModel):
    """A token-bucket rate limit. The bucket starts full, each delivery takes one token, and an interval refills it.

    The bucket fills evenly over the interval. It allows a burst of ``max_tokens`` deliveries, so 10 tokens in 10
    seconds and 1 token in 1 second are different limits.

    >>> RateLimit.parse("100/1m").max_tokens
    100
    """

    max_tokens: Whole = Field(ge=1, le=1_000_000_000)
    """number of tokens in a full bucket, and number of tokens that are added per interval"""
    interval: Whole = Field(default=1, ge=1, le=1_000_000)
    """length of the interval, in units of ``interval_unit``"""
    interval_unit: IntervalUnit = IntervalUnit.SECONDS

    @classmethod
    def parse(cls, text: str) -> RateLimit:
        """Return the rate limit that a text such as ``100/1m``, ``100/m`` or ``15/1h`` describes. Raises `ValueError`.

        >>> RateLimit.parse("100/1m").period
        60.0
        """
        return cls(**rate_fields(text))

    @property
    def period(self) -> float:
        """The length of the interval in seconds, which is the time that an empty bucket takes to fill."""
        return float(self.interval * self.interval_unit.seconds)


class Bucket(msgspec.Struct):
    """The number of tokens that a queue with a rate limit has, and the time at which it was counted."""

    tokens: float
    at: float

    def fill(self, limit: RateLimit, now: float) -> int:
        """Add the tokens for the time since the last call, and return the number of whole tokens."""
        # If the store's clock is set back, tokens for the same period must not be added twice.
        if now > self.at:
            if self.tokens < limit.max_tokens:
                self.tokens += (now - self.at) * limit.max_tokens / limit.period
            self.at = now
        self.tokens = min(self.tokens, float(limit.max_tokens))
        return math.floor(self.tokens + _DUST)

    def next_at(self, limit: RateLimit) -> float:
        """Return the time, rounded up, at which the bucket will have a whole token. Call `fill` first."""
        wait = max(0.0, 1 - self.tokens) * limit.period / limit.max_tokens
        at = self.at + wait
        return at if at - self.at >= wait else math.nextafter(at, math.inf)


def bucket_after(
    bucket: Bucket | None, before: RateLimit | None, limit: RateLimit | None, now: float
) -> Bucket | None:
    """Return the bucket after a change of a rate limit: full if there was no limit; ``None`` if there is none now."""
    if limit is None:
        return None
    if bucket is None or before is None:
        return Bucket(tokens=float(limit.max_tokens), at=now)
    bucket.fill(before, now)  # for the time until now, tokens are added at the old rate
    return bucket


def capacity_for(concurrency: Iterable[int], *factor: int) -> int:
    """Return a capacity for a queue whose tasks run on endpoints: a multiple of what the endpoints run at once.

    ``concurrency`` contains the number of tasks that each endpoint runs at once. The sum is multiplied by the largest
    ``factor``, or by 0 if there is none. The result is at most 1000. Raises `InvalidInput` for a negative number.
    """
    together = sum(_checked("concurrency", number) for number in concurrency)
    largest = max((_checked("factor", number) for number in factor), default=0)
    return min(largest * together, _MOST)


def intake_for(capacity: int) -> dict[str, Any]:
    """Return the settings for a capacity. A capacity of 0 pauses publishing, because the setting cannot be 0."""
    return {"capacity": max(1, _checked("capacity", capacity)), "intake_paused": capacity == 0}


def _checked(field: str, number: int) -> int:
    if type(number) is not int or number < 0:
        kind = "int out of range" if type(number) is int else type(number).__name__
        raise InvalidInput(field, kind, "a whole number, 0 or more")
    return number
