"""What a runner needs of a worker to report the outcomes of its tasks."""

from __future__ import annotations

from typing import Protocol

from taskqueue_core.application.context import EventSink
from taskqueue_core.retry import Outcome


class OutcomeSettler(EventSink, Protocol):
    """The part of a worker that reports the outcomes, the progress and the events of running tasks."""

    @property
    def result_limit(self) -> int:
        """The maximum size of a result in bytes."""

    def settle(self, receipt: str, outcome: Outcome) -> None:
        """Report the outcome of a task whose handler is still running and occupies a slot."""

    def finish(self, receipt: str, outcome: Outcome) -> None:
        """Report the outcome of a task, and free its slot."""

    def free(self) -> None:
        """Free the slot of a task whose outcome has been reported before, or will not be reported."""

    def lend(self, count: int) -> None:
        """Hold this number of deliveries beyond the capacity, because their handlers wait for other tasks."""

    def progress(self, receipt: str, value: float | str) -> None:
        """Report the progress of a running task: a number from 0 to 1, or text. Thread-safe."""
