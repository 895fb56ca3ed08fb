"""A change of all records of a queue in some states, which takes several steps."""

from __future__ import annotations

from collections.abc import Callable, Collection

from taskqueue_core.recordstore.store import Record
from taskqueue_core.tasks import State


class Sweep:
    """A sweep in progress: it changes the records of a key in some states with positions up to ``last``."""

    def __init__(
        self,
        key: str,
        states: Collection[State],
        change: Callable[[Record, float], None],
        last: int,
    ) -> None:
        self.key = key
        self.states = states
        self.last = last
        self.number = 0
        """number of records that were changed"""
        self._change = change

    def covers(self, record: Record) -> bool:
        """Return whether the sweep has to change a record."""
        return (
            record.task.key == self.key and record.state in self.states and record.seq <= self.last
        )

    def take(self, record: Record, now: float) -> None:
        self._change(record, now)
        self.number += 1
