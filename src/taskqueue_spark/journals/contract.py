"""Journals as the source reads them: of whatever store, by shards and by positions."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from taskqueue_core.errors import TaskQueueError
from taskqueue_spark.columns import DAMAGED, TRANSITIONS

_PART = 100_000
"""rows that are worth a task of their own"""
_PARTS = 8
"""parts of a shard at most"""


class HistoryMissing(TaskQueueError):
    """Transitions that were to be read no longer exist. ``failOnDataLoss=false`` reads what there is."""

    code = "history_missing"

    def __init__(self, shard: str, what: str) -> None:
        super().__init__(
            f"{shard}: {what}. Set failOnDataLoss=false to continue with the rest; gaps in "
            "the numbers of the transitions show what is missing"
        )


def worth(rows: int) -> int:
    """Return into how many parts so many rows are to be split, unless it is told."""
    return max(1, min(_PARTS, rows // _PART))


class ReadRange(NamedTuple):
    """What a shard has now."""

    run: str
    """names what the positions count; empty before there is anything"""
    first: int
    """the first position that can still be read"""
    end: int
    """the position behind the last"""


class Range(NamedTuple):
    """What lies between two positions."""

    shard: str
    run: str
    start: int
    end: int
    mark: str = ""
    """what stood before ``start`` when it was read up to there, as `Journal.mark` told it"""


class Watch(Enum):
    """What a reader takes for missing history."""

    NOTHING = "nothing"
    """it gives what there is"""
    RESET = "reset"
    """that it counts anew, was taken back to before where it was read, or is not there at all"""
    CUT = "cut"
    """besides, what was there when it was planned to be read and has been cut off since"""
    GAPS = "gaps"
    """besides, what is missing between any two transitions"""


class Choice(NamedTuple):
    """What of a journal is wanted."""

    schema: pa.Schema = TRANSITIONS
    """some of the columns"""
    events: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    since: int | None = None
    """from this time on (microseconds)"""
    until: int | None = None
    """before this time"""
    rows: int = 10_000
    """about how many come in a batch"""

    def of(self, event: str, key: str, time: int) -> bool:
        """Whether a transition is wanted."""
        return (
            (self.events is None or event in self.events)
            and (self.keys is None or key in self.keys)
            and (self.since is None or time >= self.since)
            and (self.until is None or time < self.until)
        )

    def wants_faults(self, event: str = DAMAGED) -> bool:
        """Whether rows are wanted that are of no key: of what is damaged, or missing."""
        return (self.events is None or event in self.events) and (
            self.keys is None or "" in self.keys
        )

    @property
    def everything(self) -> bool:
        """Whether every transition is wanted."""
        return self[1:5] == (None, None, None, None)


class Journal(Protocol):
    """A journal, for one process and one thread. A context manager.

    A shard's positions rise; its transitions stand in the order of their times, but for a clock that was set back.
    Every method may raise `BackendUnavailable` or `ConfigurationError`.
    """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def spans(self, *, quick: bool = False) -> dict[str, ReadRange]:
        """Return every shard that there is, and what it has.

        ``quick``: where nothing has come since, what it had when this was asked before, which costs least.
        """
        ...

    def after(self, shard: str, position: int, rows: int, end: int) -> int:
        """Return the position that lies about so many transitions further, at most ``end``."""
        ...

    def mark(self, shard: str, position: int) -> str:
        """Return what stands right before a position, to know it again; nothing where it cannot be told."""
        ...

    def time(self, shard: str, position: int) -> int | None:
        """Return when the first transition from a position on was (microseconds); ``None`` if there is none."""
        ...

    def at(self, shard: str, time: int, start: int, end: int) -> int:
        """Return the position between two of the first transition at or after a time, else ``end``."""
        ...

    def rows(self, shard: str, start: int, end: int) -> int:
        """Return about how many transitions lie between two positions."""
        ...

    def split(self, shard: str, start: int, end: int, parts: int) -> list[int]:
        """Return positions that part a range into at most so many of about one size: with ``start`` and ``end``.

        ``parts`` may be 0: then as many as `worth` says.
        """
        ...

    def read(self, part: Range, choice: Choice, watch: Watch) -> Iterator[pa.RecordBatch]:
        """Give the transitions of a range, in their order, and rows for what cannot be read.

        Raises `HistoryMissing` as ``watch`` says; also if the shard has another run now, of which it otherwise gives
        nothing.
        """
        ...

    def strays(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        """Give rows for what stands beyond the end of a journal's last range."""
        ...

    def missing(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        """Give a row where the last transitions of a range are missing, which no number within it shows."""
        ...
