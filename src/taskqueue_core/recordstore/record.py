"""What is stored for a task."""

from __future__ import annotations

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.tasks import Expired, State

__all__ = ["Record"]


class Record(Entry, kw_only=True, eq=False):
    """The books of one task, with what it is found by. msgspec encodes and decodes it whole."""

    seq: int = 0
    """its place in its lane, or among those of its state; a number given once"""
    at: float = 0.0
    """when it falls due, if it is scheduled"""
    owner: int | None = None
    """the number of the subscription that has it in flight"""
    patience: float | None = None
    """how many seconds it may be in flight without progress"""
    forget_at: float = 0.0
    """when it may be dropped, if it has ended"""

    @property
    def due(self) -> float | None:
        """When it is to wait: it is scheduled for then, or counts as lost from then on. ``None``: never."""
        if self.state is State.SCHEDULED:
            return self.at
        if self.state is not State.IN_FLIGHT or self.patience is None:
            return None
        end = self.updated_at + self.patience  # of the hand-out, or of the last progress
        return None if self.task.deadline is not None and self.task.deadline <= end else end

    @property
    def alarm(self) -> float | None:
        """When time alone will change it: it is due, expires or may be dropped. ``None``: never."""
        if self.ended:
            return self.forget_at
        times = (self.due, self.task.deadline if self.live else None)
        return min((time for time in times if time is not None), default=None)

    def overdue(self, now: float) -> bool:
        """Whether its deadline has come."""
        return self.task.deadline is not None and self.task.deadline <= now

    @property
    def expired(self) -> Expired:
        """The report that it expired."""
        return Expired(self.task.key, self.task.id, self.attempt)
