"""Due times of records: to become available, to be taken back for lack of progress, to expire, or to be deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from taskqueue_core.clock import Clock, Timer
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.records import TaskRecord, is_in_flight, is_scheduled

_NEVER = float("inf")


class Timers:
    """Due times of records. A due time is ignored once it no longer applies to its record."""

    def __init__(self, clock: Clock, on_due: Callable[[], object]) -> None:
        """Create timers that call ``on_due`` when a scheduled entry is due, or when a delivery must be taken back."""
        self._clock = clock
        self._on_due = on_due
        self._scheduled = DueHeap(is_scheduled)
        self._flights = DueHeap(is_in_flight)
        self.deadlines = DueHeap(_may_expire)
        """the times at which tasks expire"""
        self.ends = DueHeap(_may_be_forgotten)
        """the times at which ended records may be deleted"""
        self._timer: Timer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.next_at = _NEVER
        """time at which the timer fires; infinity if it is not set"""

    def schedule(self, record: TaskRecord, at: float) -> None:
        """Set the time at which an entry becomes available. The entry's sequence number must be new."""
        self._scheduled.add(at, record, record.seq)
        record.queue.scheduled.add(at, record, record.seq)
        self._arm(at)

    def watch(self, record: TaskRecord, at: float) -> None:
        """Set the time at which a delivery without progress is taken back. The record's ``watch`` must be new."""
        self._flights.add(at, record, record.watch)
        record.queue.flights.add(at, record, record.watch)
        self._arm(at)

    def due(self, now: float) -> tuple[list[TaskRecord], list[TaskRecord]]:
        """Remove and return the scheduled entries that are due, and the deliveries without progress."""
        self.stop()
        taken = list(self._scheduled.take(now)), list(self._flights.take(now))
        self._arm(self._scheduled.next_at())
        self._arm(self._flights.next_at())
        return taken

    def follow(self) -> None:
        """Move the timer to the running event loop, because the previous loop may have ended."""
        if self._loop is not asyncio.get_running_loop():
            at = self.next_at
            self.stop()
            self._arm(at)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.next_at = None, _NEVER

    def _arm(self, at: float | None) -> None:
        if at is not None and at < self.next_at:
            self.stop()
            self.next_at = at
            self._loop = asyncio.get_running_loop()
            self._timer = self._clock.call_at(at, self._fire)

    def _fire(self) -> None:
        at = self.next_at
        if self._clock.now() < at:  # an event loop may call back slightly too early
            self.stop()
            self._arm(at)
        else:
            self._on_due()


def _may_expire(record: TaskRecord, _seq: int) -> bool:
    # Keep the deadlines of dead letters, because dead letters may be redriven in time. Otherwise each redrive would
    # have to add the deadline again, which would fill the heap.
    return not record.ended and record.queue.records.get(record.task.id) is record


def _may_be_forgotten(record: TaskRecord, _seq: int) -> bool:
    # The state is not checked, because an ended record stays ended: a retry creates a new record.
    return record.queue.records.get(record.task.id) is record
