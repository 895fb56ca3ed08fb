"""What happens by time alone: entries fall due, hang, pass their deadline, may be forgotten. And the one timer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from taskqueue_core.clock import Clock, Timer
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.records import TaskRecord, is_in_flight, is_scheduled

_NEVER = float("inf")


class Timers:
    """Dates of records. A record that has moved on since is passed over when its date comes."""

    def __init__(self, clock: Clock, on_due: Callable[[], object]) -> None:
        """Call ``on_due`` when a scheduled entry falls due, or a delivery has been without progress for too long."""
        self._clock = clock
        self._on_due = on_due
        self._scheduled = DueHeap(is_scheduled)
        self._flights = DueHeap(is_in_flight)
        self._deadlines = DueHeap(_may_expire)
        self.ends = DueHeap(_may_be_forgotten)
        """when ended records may be forgotten"""
        self._timer: Timer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.next_at = _NEVER
        """when the timer fires"""

    def schedule(self, record: TaskRecord, at: float) -> None:
        """Note when an entry falls due. Its sequence must be new."""
        self._scheduled.add(at, record, record.seq)
        record.queue.scheduled.add(at, record, record.seq)
        self._arm(at)

    def watch(self, record: TaskRecord, at: float) -> None:
        """Note when a delivery will have been without progress for too long. Its mark must be new."""
        self._flights.add(at, record, record.watch)
        record.queue.flights.add(at, record, record.watch)
        self._arm(at)

    def due(self, now: float) -> tuple[list[TaskRecord], list[TaskRecord]]:
        """Take the scheduled entries that have fallen due, and those that hang, in the order of their times."""
        self.stop()
        taken = list(self._scheduled.take(now)), list(self._flights.take(now))
        self._arm(self._scheduled.next_at())
        self._arm(self._flights.next_at())
        return taken

    def follow(self) -> None:
        """Move the timer to the running event loop: the one it was set in may have ended."""
        if self._loop is not asyncio.get_running_loop():
            at = self.next_at
            self.stop()
            self._arm(at)

    def stop(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.next_at = None, _NEVER

    def note_deadline(self, record: TaskRecord, at: float) -> None:
        """Note a task's deadline."""
        self._deadlines.add(at, record, record.seq)

    def past_deadline(self, now: float, chunk: int) -> Iterator[TaskRecord]:
        """Take up to ``chunk`` records, live or dead, that are past their deadline."""
        return self._deadlines.take(now, chunk)

    def _arm(self, at: float | None) -> None:
        if at is not None and at < self.next_at:
            self.stop()
            self.next_at = at
            self._loop = asyncio.get_running_loop()
            self._timer = self._clock.call_at(at, self._fire)

    def _fire(self) -> None:
        at = self.next_at
        if self._clock.now() < at:  # event loops may fire slightly too early
            self.stop()
            self._arm(at)
        else:
            self._on_due()


def _may_expire(record: TaskRecord, _seq: int) -> bool:
    # A dead one may rise before its date: noting that again each time would fill the heap.
    return not record.ended and record.queue.records.get(record.task.id) is record


def _may_be_forgotten(record: TaskRecord, _seq: int) -> bool:
    # What has ended remains so: a retry begins another record.
    return record.queue.records.get(record.task.id) is record
