"""Batches: the counts of their members in this backend, which is one partition, and the batches in it."""

from __future__ import annotations

import secrets

from taskqueue_core.after import TaskRef
from taskqueue_core.authoring.batches import (
    KEPT,
    Tally,
    closed,
    is_batch,
    joined,
    moved,
    refused_by_batch,
)
from taskqueue_core.capabilities import Count, Line, LineKind
from taskqueue_core.tasks import Confirmation, State, Task
from taskqueue_memory.links import Links
from taskqueue_memory.records import TaskRecord, TaskSteps


class Batches:
    """The batches and members of batches of one backend."""

    def __init__(self, steps: TaskSteps, links: Links) -> None:
        self._steps = steps
        self._links = links
        self._partition = secrets.token_hex(8)
        self.counts: dict[TaskRef, Count] = {}
        self._lines: dict[TaskRef, str] = {}
        """ids of the lines ``count``"""
        self._tallies: dict[TaskRef, Tally] = {}
        """what the blocked batches of this backend know"""
        self._complete: dict[TaskRef, float] = {}
        """when batches became complete here, the oldest first"""

    def refused(self, task: Task) -> Confirmation | None:
        """Return the answer to a member that comes too late."""
        count = None if task.batch is None else self.counts.get(task.batch)
        if count is None or not count.closed or is_batch(task):
            return None
        return refused_by_batch(task)

    def begin(self, record: TaskRecord) -> None:
        """Count a new member, or begin to count for a new batch."""
        batch = record.task.batch
        if batch is None:
            return
        record.linked = True
        if is_batch(record.task):
            self._tallies[batch] = Tally()
        else:
            self._set(joined(self._count(batch)))

    def changed(self, record: TaskRecord, before: State | None) -> None:
        """Count a member whose state has changed; close a batch that has ended."""
        batch, state = record.task.batch, record.state
        if batch is None or state is None:
            return
        if not is_batch(record.task):
            self._set(moved(self._count(batch), before, state))
        elif not state.live:
            tally = self._tallies.pop(batch, None)
            if tally is not None and not tally.sealed:  # its members may still be added
                self._ask_to_close(batch)

    def close(self, batch: TaskRef) -> bool:
        """Ask all partitions to close a batch of this backend. Return False if there is none."""
        tally = self._tallies.get(batch)
        if tally is not None and not tally.sealed:
            self._ask_to_close(batch)
        return tally is not None

    def _ask_to_close(self, batch: TaskRef) -> None:
        lines = self._links.lines.values()
        if not any(line.kind is LineKind.CLOSE and line.parent == batch for line in lines):
            self._links.add(Line(id="", kind=LineKind.CLOSE, parent=batch))

    def seal(self, batch: TaskRef) -> Count:
        """Accept no more members of a batch, and return its count."""
        self._set(closed(self._count(batch)))
        return self.counts[batch]

    def tally(self, counts: tuple[Count, ...], *, sealed: bool) -> None:
        """Report counts to their batches, and end those whose members have ended."""
        by_batch: dict[TaskRef, list[Count]] = {}
        for count in counts:
            by_batch.setdefault(count.batch, []).append(count)
        for batch, those in by_batch.items():
            record = self._steps.find(batch.key, batch.task_id)
            tally = self._tallies.get(batch)
            if record is not None and tally is not None:
                change = tally.hear(those, sealed=sealed)
                if change is not None:
                    self._steps.unblock(record, change)

    def confirmed(self, line: Line) -> None:
        """Forget the id of a line ``count`` that was confirmed."""
        if self._lines.get(line.parent) == line.id:
            del self._lines[line.parent]

    def forget(self, now: float) -> None:
        """Forget batches that have been complete for long."""
        while self._complete:
            batch, at = next(iter(self._complete.items()))
            if now < at + KEPT:
                return
            del self._complete[batch]
            self.counts.pop(batch, None)

    def _count(self, batch: TaskRef) -> Count:
        return self.counts.get(batch) or Count(batch=batch, partition=self._partition, version=0)

    def _set(self, count: Count) -> None:
        batch = count.batch
        if self.counts.get(batch) is count:
            return
        self.counts[batch] = count
        if count.complete:
            self._complete.pop(batch, None)
            self._complete[batch] = self._steps.clock.now()
            links = self._links
            links.drop(self._lines.pop(batch, None))
            line = Line(id="", kind=LineKind.COUNT, parent=batch, count=count)
            self._lines[batch] = str(links.add(line))
