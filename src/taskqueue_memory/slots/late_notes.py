"""Storage for notes that arrived after their job's lease had ended, limited in time and size."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

_OF_A_JOB = 8
_IN_ALL = 1000
_BYTES = 16 * 1024 * 1024
_MAX_STORED = 3600.0
"""seconds for which a note is kept"""


class _Note(NamedTuple):
    number: int
    at: float
    text: bytes


class LateNotes:
    """The latest notes of each job, kept for an hour, with limits on the total number and size."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], deque[_Note]] = {}
        self._order: OrderedDict[int, tuple[str, str]] = OrderedDict()
        self._numbers = 0
        self._bytes = 0

    def add(self, model: str, job: str, note: bytes, now: float) -> None:
        """Store a note, and delete the oldest notes if a limit is exceeded."""
        self.forget(now)
        notes = self._jobs.setdefault((model, job), deque())
        self._numbers += 1
        notes.append(_Note(self._numbers, now, note))
        self._order[self._numbers] = (model, job)
        self._bytes += len(note)
        if len(notes) > _OF_A_JOB:
            self._drop(model, job)
        while len(self._order) > _IN_ALL or self._bytes > _BYTES:
            self._drop(*next(iter(self._order.values())))

    def of(self, model: str, job: str, now: float) -> tuple[bytes, ...]:
        """Return the notes of a job, oldest first."""
        self.forget(now)
        return tuple(note.text for note in self._jobs.get((model, job), ()))

    def forget(self, now: float) -> None:
        """Delete the notes that are older than an hour."""
        while self._order:
            key = next(iter(self._order.values()))
            if self._jobs[key][0].at + _MAX_STORED > now:
                return
            self._drop(*key)

    def _drop(self, model: str, job: str) -> None:
        notes = self._jobs[model, job]
        oldest = notes.popleft()
        del self._order[oldest.number]
        self._bytes -= len(oldest.text)
        if not notes:
            del self._jobs[model, job]
