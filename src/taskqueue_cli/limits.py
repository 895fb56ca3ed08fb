"""Parsing and formatting of the limits of queues, for the options and the output of commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import InvalidInput
from taskqueue_core.rate_limit import RATE_EXAMPLES, RATE_UNITS, RateLimit, rate_fields

NONE = "none"
_NUMBER = re.compile(r"[0-9]{1,10}")
_SECONDS = re.compile(r"[0-9]{1,10}(?:\.[0-9]{1,10})?")
_DELAYS = re.compile(rf"{_SECONDS.pattern}(?:, ?{_SECONDS.pattern})*")
_MAX_NAMES = 3
"""maximum number of tenants or queues that one line lists"""
_UNIT_LETTERS = {unit: letter for letter, unit in RATE_UNITS.items()}


def parse_number(field: str, text: str) -> int | None:
    """Return the number in ``text``, or None for ``none``. Raises `InvalidInput`, which names ``field``."""
    match = _match(field, text, _NUMBER, "a whole number of at most 10 digits")
    return match and int(match[0])


def parse_seconds(field: str, text: str) -> float | None:
    """Return the seconds in ``text``, or None for ``none``. Raises `InvalidInput`, which names ``field``."""
    match = _match(field, text, _SECONDS, "a number of seconds, for example 600 or 0.5")
    return match and float(match[0])


def parse_delays(field: str, text: str) -> list[float]:
    """Return the seconds in a text such as ``5,60,900``; none for ``none``. Raises `InvalidInput`, as above."""
    allowed = "numbers of seconds, separated by commas, for example 5,60,900"
    match = _match(field, text, _DELAYS, allowed)
    return [] if match is None else [float(part) for part in text.split(",")]


def _match(field: str, text: str, pattern: re.Pattern[str], allowed: str) -> re.Match[str] | None:
    if text == NONE:
        return None
    if match := pattern.fullmatch(text):
        return match
    raise InvalidInput(
        field, f"text of length {len(text)} in an invalid format", f"{allowed}, or {NONE}"
    )


def apply_weights(weights: Mapping[str, int], texts: Iterable[str]) -> dict[str, int]:
    """Return the weights of tenants, changed by the values of ``--weight``. Raises `InvalidInput`.

    ``TENANT=N`` sets the weight of one tenant, ``TENANT=none`` removes it, and ``none`` removes all weights.
    """
    changed = dict(weights)
    for text in texts:
        tenant, sign, number = text.rpartition("=")
        if text == NONE:
            changed.clear()
        elif not (sign and tenant):
            raise InvalidInput(
                "weight",
                f"text of length {len(text)} that does not begin with a tenant and '='",
                f"TENANT=N, TENANT=none, or {NONE}",
            )
        elif (weight := parse_number("weight", number)) is None:
            changed.pop(tenant, None)
        else:
            changed[tenant] = weight
    return changed


def parse_names(texts: Iterable[str]) -> list[str]:
    """Return the values of an option that names things; none of them for ``none`` alone."""
    names = list(texts)
    return [] if names == [NONE] else names


def parse_rate(field: str, text: str) -> dict[str, Any] | None:
    """Return the fields of a `RateLimit` for a text such as ``100/1m`` or ``100/m``, or None for ``none``.

    Raises `InvalidInput`, which names ``field``.
    """
    if text == NONE:
        return None
    try:
        return rate_fields(text)
    except ValueError:
        got = f"text of length {len(text)} in an invalid format"
        raise InvalidInput(field, got, f"{RATE_EXAMPLES}, or {NONE}") from None


def format_rate(limit: RateLimit) -> str:
    """Format a rate limit as `parse_rate` reads it, for example ``100/1m``."""
    return f"{limit.max_tokens}/{limit.interval}{_UNIT_LETTERS[limit.interval_unit]}"


def describe_limits(settings: QueueSettings) -> list[str]:
    """Return a short text for each of the settings below that is not at its default."""
    fields = {
        "paused": settings.paused,
        "intake paused": settings.intake_paused,
        f"moved to {settings.moved_to}": settings.moved_to,
        f"capacity {settings.capacity or 0:,}": settings.capacity,
        f"{settings.max_inflight or 0:,} in flight": settings.max_inflight,
        _format_optional_rate(settings.rate_limit): settings.rate_limit,
        f"redelivered after {settings.max_processing_time or 0:,g} s without progress": settings.max_processing_time,
        f"an attempt fails after {settings.timeout or 0:,g} s": settings.timeout,
        "fair": settings.order is Order.FAIR,
        f"weights {_join_some(f'{name}={n}' for name, n in settings.weights.items())}": settings.weights,
        f"capacity {settings.tenant_capacity or 0:,} per tenant": settings.tenant_capacity,
        f"{settings.tenant_max_inflight or 0:,} in flight per tenant": settings.tenant_max_inflight,
        f"{_format_optional_rate(settings.tenant_rate_limit)} per tenant": settings.tenant_rate_limit,
        f"paused tenants {_join_some(settings.paused_tenants)}": settings.paused_tenants,
        f"{settings.floor_share:.0%} for each priority": settings.floor_share,
        f"{settings.shards:,} shards": settings.shards > 1,
        f"indexed by {_join_some(settings.index)}": settings.index,
        f"keeps ended tasks for {settings.keep_ended:,g} s": settings.keep_ended,
        f"copied to {_join_some(settings.bound_to)}": settings.bound_to,
    }
    return [text for text, active in fields.items() if active]


def _format_optional_rate(limit: RateLimit | None) -> str:
    return "" if limit is None else format_rate(limit)


def _join_some(names: Iterable[str]) -> str:
    shown = list(names)
    more = len(shown) - _MAX_NAMES
    return " ".join(shown[:_MAX_NAMES]) + (f" and {more:,} more" if more > 0 else "")
