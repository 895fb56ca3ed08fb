"""The state of a worker, and what it has done."""

from __future__ import annotations

import msgspec

from taskqueue_core.retry import Failed, HandBack, Outcome, RetryLater, Snoozed


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker, and what it has done in this run."""

    keys: tuple[str, ...]
    """the queues that it works for"""
    concurrency: int
    """maximum number of tasks that run at once"""
    grace: float
    """seconds that running handlers have when the worker stops"""
    ready: bool = False
    """whether it is connected, and is not stopping"""
    running: int = 0
    """number of running tasks"""
    outcomes: dict[str, dict[str, int]] = {}
    """number of ended attempts by queue and by outcome: success, failure, retry, snooze, rejected or released"""


_OUTCOME_NAMES: dict[type[Outcome], str] = {
    Failed: "failure",
    RetryLater: "retry",
    Snoozed: "snooze",
    HandBack: "released",
}


def outcome_name(kind: type[Outcome]) -> str:
    """Return the name of a kind of outcome, for reports and metrics."""
    return _OUTCOME_NAMES.get(kind, kind.__name__.lower())
