"""Limits of the flow, as commands read and show them."""

from __future__ import annotations

import re
from typing import Any

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.flow import IntervalUnit, RateLimit

__all__ = ["NONE", "limits_of", "number_of", "rate_of", "rate_text"]

NONE = "none"
_NUMBER = re.compile(r"[0-9]{1,10}")
_RATE = re.compile(rf"({_NUMBER.pattern})/([0-9]{{0,7}})([smh])")
_UNITS = {"s": IntervalUnit.SECONDS, "m": IntervalUnit.MINUTES, "h": IntervalUnit.HOURS}
_LETTERS = {unit: letter for letter, unit in _UNITS.items()}


def number_of(field: str, word: str) -> int | None:
    """Read a number, or ``none``. Raises `InvalidInput`."""
    if word == NONE:
        return None
    if _NUMBER.fullmatch(word):
        return int(word)
    raise InvalidInput(field, f"text of length {len(word)}", f"a number, or {NONE}")


def rate_of(word: str) -> dict[str, Any] | None:
    """Read ``100/1m`` (``100/m`` will do) as the fields of a rate limit, or ``none``. Raises `InvalidInput`."""
    if word == NONE:
        return None
    if found := _RATE.fullmatch(word):
        tokens, interval, unit = found.groups()
        return {
            "max_tokens": int(tokens),
            "interval": int(interval or 1),
            "interval_unit": _UNITS[unit],
        }
    allowed = f"tasks in a time, as 100/1m, 1000/1s or 15/1h, or {NONE}"
    raise InvalidInput("rate", f"text of length {len(word)}", allowed)


def rate_text(limit: RateLimit) -> str:
    """Return what `rate_of` reads."""
    return f"{limit.max_tokens}/{limit.interval}{_LETTERS[limit.interval_unit]}"


def limits_of(settings: QueueSettings) -> list[str]:
    """Say in a few words each what limits a queue."""
    found = []
    if settings.paused:
        found.append("paused")
    if settings.intake_paused:
        found.append("intake paused")
    if settings.capacity is not None:
        found.append(f"capacity {settings.capacity:,}")
    if settings.max_inflight:
        found.append(f"{settings.max_inflight:,} in flight")
    if settings.rate_limit is not None:
        found.append(rate_text(settings.rate_limit))
    return found
