"""What happens by time alone: which entries fall due, pass their deadline, or may be forgotten, and the one timer."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from taskqueue_core.clock import Clock, Timer
from taskqueue_core.tasks import State
from taskqueue_memory.records import Record

__all__ = ["Calendar"]

_Dates = list[tuple[float, int, Record]]


class Calendar:
    """Dates of records. A record that has moved on since is passed over when its date comes."""

    def __init__(self, clock: Clock, on_due: Callable[[], object]) -> None:
        """Call ``on_due`` when a scheduled entry falls due."""
        self._clock = clock
        self._on_due = on_due
        self._order = itertools.count()
        self._deadlines: _Dates = []
        self._ends: _Dates = []
        self._timer: Timer | None = None
        self.next_at = float("inf")
        """when the timer rings"""

    def schedule(self, record: Record, at: float) -> None:
        """Note when an entry falls due. Its sequence must be new."""
        heapq.heappush(record.queue.scheduled, (at, record.seq, record))
        self.arm(at)

    def arm(self, at: float | None) -> None:
        """See to it that the timer rings at ``at`` or before."""
        if at is not None and at < self.next_at:
            self.stop()
            self.next_at = at
            self._timer = self._clock.call_at(at, self._ring)

    def stop(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.next_at = None, float("inf")

    def note_deadline(self, record: Record, at: float) -> None:
        """Note a task's deadline."""
        heapq.heappush(self._deadlines, (at, next(self._order), record))

    def note_end(self, record: Record, at: float) -> None:
        """Note when an ended record may be forgotten. Its sequence must be new."""
        heapq.heappush(self._ends, (at, record.seq, record))

    def past_deadline(self, now: float, chunk: int) -> Iterator[Record]:
        """Take up to ``chunk`` dates; yield the records that are live still."""
        for _, _, record in _take(self._deadlines, now, chunk):
            if record.state.live and record.queue.records.get(record.task.id) is record:
                yield record

    def forgettable(self, now: float, chunk: int) -> Iterator[Record]:
        """Take up to ``chunk`` dates; yield the records that ended at that time and are known still."""
        for _, seq, record in _take(self._ends, now, chunk):
            known = record.queue.records.get(record.task.id) is record
            if known and record.seq == seq and record.state is not State.DEAD:
                yield record

    def _ring(self) -> None:
        at = self.next_at
        if self._clock.now() < at:  # event loops may ring a hair too early
            self.stop()
            self.arm(at)
        else:
            self._on_due()


def _take(dates: _Dates, now: float, chunk: int) -> Iterator[tuple[float, int, Record]]:
    while chunk > 0 and dates and dates[0][0] <= now:
        chunk -= 1
        yield heapq.heappop(dates)
