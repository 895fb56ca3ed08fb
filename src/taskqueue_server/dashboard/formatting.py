"""Formatting of values for the pages, and the texts of those page elements that the event stream updates."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Ledger
from taskqueue_server.dashboard.snapshot import History, MetricsWindow, Snapshot, StoreReading

PARTS = tuple(field for field in Ledger.__struct_fields__ if field != "published")
"""states whose counts add up to the number of published tasks, in the order of a task's life"""
_NONE = "\N{EN DASH}"
_LONG = 10
"""lowest value that is shown without decimals"""
_WIDE, _HIGH = 960, 200
_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (0.001, "ms"))


def count(number: int) -> str:
    """Format an integer with thousands separators."""
    return f"{number:,}"


def rate(per_second: float) -> str:
    """Format a rate per second."""
    return f"{per_second:,.0f}" if per_second >= _LONG or per_second == 0 else f"{per_second:.1f}"


def duration(seconds: float | None) -> str:
    """Format a duration in the largest unit that fits; return a dash for ``None``."""
    if seconds is None:
        return _NONE
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    number = seconds / size
    return f"{number:.1f} {unit}" if number < _LONG else f"{number:.0f} {unit}"


def age(at: float | None, now: float) -> str:
    """Format the time from ``at`` to ``now``; return a dash if ``at`` is ``None``."""
    return _NONE if at is None else duration(max(0.0, now - at)) if now - at >= 1 else "0 s"


def clock(at: float) -> str:
    """Format Unix seconds as a date and a time in UTC."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return _NONE


def rate_limit(limit: RateLimit | None) -> str:
    """Format the rate limit of a queue."""
    if limit is None:
        return "no limit"
    unit = limit.interval_unit.value.lower()
    span = unit.removesuffix("s") if limit.interval == 1 else f"{limit.interval} {unit}"
    return f"{count(limit.max_tokens)} per {span}"


def limits(settings: QueueSettings) -> list[tuple[str, str]]:
    """Return the settings that the page of a queue lists, as pairs of label and value."""
    results = [
        ("Capacity", "no limit" if settings.capacity is None else count(settings.capacity)),
        (
            "In flight",
            "no limit" if settings.max_inflight is None else count(settings.max_inflight),
        ),
        ("Rate", rate_limit(settings.rate_limit)),
        ("Order", "fair by tenant" if settings.order is Order.FAIR else "first in, first out"),
    ]
    if settings.tenant_max_inflight is not None:
        results.append(("In flight per tenant", count(settings.tenant_max_inflight)))
    if settings.tenant_rate_limit is not None:
        results.append(("Rate per tenant", rate_limit(settings.tenant_rate_limit)))
    if settings.tenant_capacity is not None:
        results.append(("Capacity per tenant", count(settings.tenant_capacity)))
    if settings.paused_tenants:
        results.append(("Paused tenants", count(len(settings.paused_tenants))))
    if settings.shards > 1:
        results.append(("Shards", count(settings.shards)))
    if settings.bound_to:
        results.append(("Copied to", ", ".join(settings.bound_to)))
    if settings.moved_to:
        results.append(("Moved to", settings.moved_to))
    return results


def balance(ledger: Ledger) -> tuple[str, str]:
    """Return whether the ledger balances, as two values: the state of a page element, and the text to show in it."""
    if ledger.balanced:
        return "ok", "Every task is accounted for"
    missing = ledger.imbalance
    what = "missing" if missing > 0 else "too many"
    return "bad", f"Ledger does not balance: {count(abs(missing))} {what}"


def of_ledger(ledger: Ledger) -> dict[str, str]:
    """Return the ledger's texts by page element. The key ``@NAME`` holds the state of the element ``NAME``."""
    state, names = balance(ledger)
    texts = {f"ledger.{name}": count(getattr(ledger, name)) for name in ("published", *PARTS)}
    return {**texts, "balance": names, "@balance": state}


def of_queue(
    key: str, reading: StoreReading, snapshot: Snapshot, history: History
) -> dict[str, str]:
    """Return the queue's texts by page element.

    The key ``@NAME`` holds the state of the element ``NAME``; the key ``~NAME`` holds the line of a sparkline.
    """
    ledger, settings, window = reading.ledger, reading.settings, history.window([key])
    name, names = state_of(reading, window)
    busy = f"{count(ledger.in_flight)} / {count(settings.max_inflight or 0)}"
    full = f"{count(ledger.waiting)} / {count(settings.capacity or 0)}"
    held = reading.stats.blocked_on_dead
    return {
        f"q.{key}.state": names,
        f"@q.{key}.state": name,
        f"q.{key}.waiting": full if settings.capacity else count(ledger.waiting),
        f"q.{key}.blocked": f"{count(ledger.blocked)} ({count(held)} held)"
        if held
        else count(ledger.blocked),
        f"q.{key}.blocked_on_dead": count(held),
        f"q.{key}.scheduled": count(ledger.scheduled),
        f"q.{key}.in_flight": busy if settings.max_inflight else count(ledger.in_flight),
        f"q.{key}.oldest": age(reading.stats.oldest_waiting, snapshot.at),
        f"q.{key}.published": rate(window.published),
        f"q.{key}.done": rate(window.done),
        f"q.{key}.p50": duration(reading.run_time.p50 if reading.run_time else None),
        f"q.{key}.p95": duration(reading.run_time.p95 if reading.run_time else None),
        f"q.{key}.dead": count(ledger.dead),
        f"@q.{key}.dead": "bad" if ledger.dead else "none",
        f"q.{key}.redelivered": count(reading.stats.redelivered),
        f"q.{key}.retried": count(reading.stats.retried),
        f"q.{key}.lost": count(reading.stats.lost),
        f"q.{key}.subscribers": count(reading.stats.subscribers),
        f"~q.{key}.depth": sparkline(history.series(key)),
    }


def state_of(reading: StoreReading, window: MetricsWindow) -> tuple[str, str]:
    """Return what a queue is doing, as two values: the state of a page element, and the text to show in it."""
    settings, ledger = reading.settings, reading.ledger
    flows = window.published or window.done
    states = [
        (not ledger.balanced, "bad", "Ledger does not balance"),
        (settings.moved_to is not None, "paused", "Moved"),
        (settings.paused and settings.intake_paused, "paused", "Paused, intake paused"),
        (settings.paused, "paused", "Paused"),
        (settings.intake_paused, "paused", "Intake paused"),
        (ledger.waiting and not reading.stats.subscribers, "warn", "No consumer"),
        (window.dead and not window.done, "bad", "Failing"),
        (flows or ledger.in_flight or ledger.waiting, "ok", "Working"),
        (ledger.dead and not ledger.scheduled and not ledger.blocked, "bad", "Only dead letters"),
    ]
    return next(((state, text) for holds, state, text in states if holds), ("idle", "Idle"))


def sparkline(series: Sequence[int | None]) -> str:
    """Return a sparkline as the attribute ``d`` of an SVG path, which breaks where the series has ``None``."""
    known = [value for value in series if value is not None]
    if len(known) <= 1:
        return ""
    steps, scale = len(series) - 1, (_HIGH - 20) / max(*known, 1)
    heights = [None if value is None else _HIGH - 10 - int(value * scale) for value in series]
    path: list[str] = []
    for index, height in enumerate(heights):
        before = heights[index - 1] if index else None
        after = heights[index + 1] if index < steps else None
        # Leave out points in the middle of several equal values, so that the text of an idle queue is short.
        if height is not None and not before == height == after:
            path.append(f"{'M' if before is None else 'L'}{index * _WIDE // steps},{height}")
    return "".join(path)
