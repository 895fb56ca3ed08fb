"""The interface of journals: shards with positions, whatever the store."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import pyarrow as pa

from taskqueue_core.errors import TaskQueueError
from taskqueue_spark.columns import DAMAGED, TRANSITIONS

_PART = 100_000
"""number of rows that justifies a Spark task of its own"""
_PARTS = 8
"""maximum number of parts of a shard"""


class HistoryMissing(TaskQueueError):
    """Transitions that were to be read no longer exist. ``failOnDataLoss=false`` reads the rest."""

    code = "history_missing"

    def __init__(self, shard: str, what: str) -> None:
        super().__init__(
            f"{shard}: {what}. Set failOnDataLoss=false to continue with the rest; gaps in "
            "the numbers of the transitions show what is missing"
        )


def worth(rows: int) -> int:
    """Return the default number of parts for a range with this many rows."""
    return max(1, min(_PARTS, rows // _PART))


class ReadRange(NamedTuple):
    """The positions that a shard has now."""

    run: str
    """the run whose transitions the positions count; empty for an empty shard"""
    first: int
    """the first position that can still be read"""
    end: int
    """the position after the last one"""


class Range(NamedTuple):
    """The transitions between two positions of a shard."""

    shard: str
    run: str
    start: int
    end: int
    mark: str = ""
    """the `Journal.mark` of ``start`` when the journal was read up to there"""


class Watch(Enum):
    """Which missing history makes a read fail."""

    NOTHING = "nothing"
    """none: the read returns what exists"""
    RESET = "reset"
    """a journal that was reset, rolled back to before the last read, or removed"""
    CUT = "cut"
    """also transitions that were removed after the read was planned"""
    GAPS = "gaps"
    """also any number that is missing between two transitions"""


class Choice(NamedTuple):
    """The columns and rows of a journal to read."""

    schema: pa.Schema = TRANSITIONS
    """some of the columns"""
    events: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    since: int | None = None
    """the first time that is included (microseconds)"""
    until: int | None = None
    """the first time that is no longer included"""
    rows: int = 10_000
    """approximate number of rows in a batch"""

    def of(self, event: str, key: str, time: int) -> bool:
        """Return whether a transition is included."""
        return (
            (self.events is None or event in self.events)
            and (self.keys is None or key in self.keys)
            and (self.since is None or time >= self.since)
            and (self.until is None or time < self.until)
        )

    def wants_faults(self, event: str = DAMAGED) -> bool:
        """Return whether rows about damaged or missing entries are included. They have no key."""
        return self._replace(since=None, until=None).of(event, "", 0)

    @property
    def everything(self) -> bool:
        """Whether every transition is included."""
        return self[1:5] == (None, None, None, None)


class Journal(Protocol):
    """A journal, for one process and one thread. A context manager, which closes it.

    The positions of a shard rise. Its transitions are in the order of their times, unless a clock was set back.
    Every method may raise `BackendUnavailable` or `ConfigurationError`.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connections. By default there are none."""
        return

    def spans(self, *, quick: bool = False) -> dict[str, ReadRange]:
        """Return all shards with their positions.

        ``quick``: for a shard without new transitions, return the result of the previous call, which is cheaper.
        """
        ...

    def after(self, shard: str, position: int, rows: int, end: int) -> int:
        """Return the position about this many transitions after another one, at most ``end``."""
        ...

    def mark(self, shard: str, position: int) -> str:
        """Return a mark of the transition right before a position, to recognize it later; empty if unknown."""
        ...

    def time(self, shard: str, position: int) -> int | None:
        """Return the time (microseconds) of the first transition from a position on; ``None`` without one."""
        ...

    def at(self, shard: str, time: int, start: int, end: int) -> int:
        """Return the position, between two others, of the first transition at or after a time; else ``end``."""
        ...

    def rows(self, shard: str, start: int, end: int) -> int:
        """Return the approximate number of transitions between two positions."""
        ...

    def split(self, shard: str, start: int, end: int, parts: int) -> list[int]:
        """Return the bounds of at most ``parts`` ranges of similar size, from ``start`` to ``end``.

        With ``parts`` 0 their number is the default, `worth`.
        """
        ...

    def read(self, part: Range, choice: Choice, watch: Watch) -> Iterator[pa.RecordBatch]:
        """Yield the transitions of a range in their order, and rows about entries that cannot be read.

        Raises `HistoryMissing` according to ``watch``, also if the shard has another run now. A range of another run
        is empty otherwise.
        """
        ...

    def strays(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        """Yield rows about entries that are stored after the end of the journal's last range."""
        ...

    def missing(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        """Yield a row if the last transitions of a range are missing, which no number in the range shows."""
        ...
