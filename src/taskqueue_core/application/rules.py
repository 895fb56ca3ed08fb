"""What a handler may raise or return to say how its attempt ended."""

from __future__ import annotations

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_duration

_MAX_DELAY_SECONDS = 365 * 86_400


class Retry(Exception):
    """A request for another attempt, after ``delay`` seconds or as the queue's retry policy says. Raise or return it.

    The attempt counts towards the maximum number of attempts, but not as a failure for the worker's quarantine.
    Raises `InvalidInput` for a delay that is no number from 0 to 31536000 seconds (a year). ::

        raise Retry(30, "the other side is busy")
    """

    def __init__(self, delay: float | None = None, error: str = "retry requested") -> None:
        if delay is not None:
            _check_delay(delay)
        super().__init__(error)
        self.delay = delay
        self.error = error


class Reject(Exception):
    """A request to make the task a dead letter, because no further attempt can succeed. Raise or return it.

    ``reason`` is a short code, and ``error`` an optional text; both are stored with the dead letter. ::

        raise Reject("bad_address", f"no such host: {host}")
    """

    def __init__(self, reason: str, error: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


class Snooze(Exception):
    """A request to run the task again after ``delay`` seconds, which counts no attempt. Raise or return it.

    It is neither a failure nor a loss: `Context.attempt` grows, `Context.failures` does not. The task's deadline ends
    it, and so does the maximum of 50000 attempts. Raises `InvalidInput` for a delay that is no number from 0 to
    31536000 seconds (a year). ::

        raise Snooze(60)  # the report is not ready yet
    """

    def __init__(self, delay: float) -> None:
        _check_delay(delay)
        super().__init__(f"run again in {delay:g} s")
        self.delay = delay


Rule = Retry | Reject | Snooze


def _check_delay(delay: float) -> None:
    check_duration("delay", delay)
    if delay > _MAX_DELAY_SECONDS:
        raise InvalidInput("delay", "a number out of range", "0 to 31536000 seconds (a year)")
