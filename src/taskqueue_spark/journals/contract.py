"""The interface for reading journals: shards with positions, for every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from taskqueue_core.errors import TaskQueueError
from taskqueue_spark.columns import DAMAGED, TRANSITIONS

_PART = 100_000
"""minimum number of rows for which a separate Spark task is worthwhile"""
_PARTS = 8
"""maximum number of ranges into which a shard is divided by default"""


class HistoryMissing(TaskQueueError):
    """Raised if transitions to read no longer exist. With ``failOnDataLoss=false``, the rest is read instead."""

    code = "history_missing"

    def __init__(self, shard: str, what: str) -> None:
        super().__init__(
            f"{shard}: {what}. Set failOnDataLoss=false to continue with the rest; gaps in "
            "the numbers of the transitions then show what is missing"
        )


class ReadRange(NamedTuple):
    """The current range of positions of a shard."""

    run: str
    """the run to which the positions belong; empty for an empty shard"""
    first: int
    """the first position that can still be read"""
    end: int
    """the position after the last transition"""


class Range(NamedTuple):
    """The transitions between two positions of a shard."""

    shard: str
    run: str
    start: int
    end: int
    mark: str = ""
    """the `Journal.mark` of ``start``, recorded when the journal had been read up to that position; empty if unknown"""


class Watch(Enum):
    """The kinds of missing history for which a read fails."""

    NOTHING = "nothing"
    """never fail; return the transitions that exist"""
    RESET = "reset"
    """fail if the journal was reset, rolled back to a state before the last read, or removed"""
    CUT = "cut"
    """like `RESET`; also fail if transitions were removed after the read was planned"""
    GAPS = "gaps"
    """like `CUT`; also fail if the number of a transition is missing and no damaged entry explains this"""


class Choice(NamedTuple):
    """The columns and rows of a journal to read."""

    schema: pa.Schema = TRANSITIONS
    """the columns to read, all or some of `TRANSITIONS`"""
    events: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    since: int | None = None
    """earliest included time, in microseconds since 1970"""
    until: int | None = None
    """earliest excluded time, in microseconds since 1970"""
    rows: int = 10_000
    """approximate number of rows in one Arrow batch"""

    def of(self, event: str, key: str, time: int) -> bool:
        """Return whether a transition with these values is included."""
        return (
            (self.events is None or event in self.events)
            and (self.keys is None or key in self.keys)
            and (self.since is None or time >= self.since)
            and (self.until is None or time < self.until)
        )

    def wants_faults(self, event: str = DAMAGED) -> bool:
        """Return whether rows about damaged or missing entries are included. Such rows have no key."""
        return self._replace(since=None, until=None).of(event, "", 0)

    @property
    def everything(self) -> bool:
        """Whether every transition is included."""
        return self[1:5] == (None, None, None, None)


class Journal(Protocol):
    """A reader of a journal, for one process and one thread. As a context manager, it closes itself at the end.

    A later transition of a shard has a higher position, and a later time unless a clock was set back. Every method may
    raise `BackendUnavailable` or `ConfigurationError`.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        return

    def spans(self, *, quick: bool = False) -> dict[str, ReadRange]:
        """Return all shards with their current ranges.

        ``quick``: for a shard without new transitions, the result of the previous call may be returned, which is
        cheaper.
        """

    def after(self, shard: str, position: int, rows: int, end: int) -> int:
        """Return the position about ``rows`` transitions after ``position``, or ``end`` if that is lower."""

    def mark(self, shard: str, position: int) -> str:
        """Return a text that identifies the transition before a position; empty if unknown."""

    def time(self, shard: str, position: int) -> int | None:
        """Return the time (microseconds) of the first transition at or after a position; ``None`` if there is none."""

    def at(self, shard: str, time: int, start: int, end: int) -> int:
        """Return the first position between ``start`` and ``end`` with a time of at least ``time``; else ``end``."""

    def rows(self, shard: str, start: int, end: int) -> int:
        """Return the approximate number of transitions from ``start`` up to, but not including, ``end``."""

    def split(self, shard: str, start: int, end: int, parts: int) -> list[int]:
        """Return the bounds of at most ``parts`` ranges of similar size, from ``start`` to ``end``.

        If ``parts`` is 0, `parts_for` decides the number of ranges.
        """

    @staticmethod
    def parts_for(rows: int) -> int:
        """Return the default number of ranges into which to divide this many rows."""
        return max(1, min(_PARTS, rows // _PART))

    def read(self, part: Range, choice: Choice, watch: Watch) -> Iterator[pa.RecordBatch]:
        """Yield the transitions of a range in order, and rows about entries that cannot be read.

        Raises `HistoryMissing` for the kinds of missing history that ``watch`` names. With `Watch.NOTHING`, yields no
        transitions if the shard now has another run.
        """

    def strays(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        """Yield rows about damaged entries after the last transition of a shard. ``part`` is the shard's last range."""

    def missing(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        """Yield a row if a range lacks its last transitions.

        The numbers alone show only a gap that another transition follows.
        """
