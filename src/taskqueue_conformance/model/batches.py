"""The batches of the model: which ones are closed, and how their members have ended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from taskqueue_conformance.model.entries import Entry
from taskqueue_core.after import TaskRef
from taskqueue_core.tasks import State, Task


class Batches:
    """What is known of batches by their names, whether or not there are tasks with these names."""

    def __init__(self) -> None:
        self.closing: set[TaskRef] = set()
        """batches that accept no more members once all lines are carried"""
        self._closed: set[TaskRef] = set()
        self._past: defaultdict[TaskRef, Counter[State]] = defaultdict(Counter)
        """final states of members whose ids were used again"""

    def refuses(self, task: Task) -> bool:
        """Return whether a task is a new member of a batch that is closed."""
        return task.batch in self._closed and not is_batch(task)

    def dropped(self, entry: Entry) -> None:
        """Record that the id of an ended task is used again. The task still counts if it was a member."""
        if entry.task.batch is not None and not is_batch(entry.task):
            self._past[entry.task.batch][entry.state] += 1

    def carried(self, entries: Iterable[Entry]) -> None:
        """Record that all lines were carried, so that no partition accepts members of a closed batch."""
        for entry in entries:
            ours = is_batch(entry.task) and entry.task.batch in self.closing
            entry.closed = entry.closed or (ours and entry.state is State.BLOCKED)
        self._closed |= self.closing
        self.closing = set()

    def end_of(self, batch: Entry, entries: Iterable[Entry]) -> State | None:
        """Return the final state of a blocked batch; ``None`` if it is not closed, or a member has not ended."""
        if not batch.closed or batch.task.batch is None:
            return None
        states = [e.state for e in entries if e.task.batch == batch.task.batch and e is not batch]
        if any(state.live or state is State.DEAD for state in states):
            return None
        ends = {*states, *self._past[batch.task.batch]}
        return State.DONE if ends <= {State.DONE} else State.CANCELLED


def is_batch(task: Task) -> bool:
    """Return whether a task is a batch, and not a member of one."""
    return task.batch == TaskRef(task.key, task.id)
