"""Reading the journal that the scripts write, without touching what servers and workers use.

An entry of a partition's journal tells what one step did to some tasks; its transitions have numbers without gaps,
of which the stream's id is the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, NamedTuple, Self

from taskqueue_redis.config import RedisSettings
from taskqueue_redis.keys import Partitions
from taskqueue_redis.link import Link
from taskqueue_redis.translation import translated

__all__ = ["COLUMNS", "HEAD", "JOURNAL_VERSION", "Entry", "JournalReader", "Span"]

JOURNAL_VERSION = 2
HEAD = ("v", "ts", "event", "key", "state", "worker", "reason")
"""fields that an entry has once, in this order"""
COLUMNS = (
    "task_id", "attempt", "losses", "priority", "tenant", "ordering_key", "due_at", "error",
)  # fmt: skip
"""fields behind these: a value per transition with NUL between them, or (but for the ids) one for all"""
_AT_ONCE = 512 * 1024
"""bytes that a reply is meant to have: Redis serves nobody else while it writes one"""
_MOST = 2000
"""entries in a reply"""


class Span(NamedTuple):
    """What a partition's journal has."""

    epoch: str
    """of the installation: another one begins to count anew"""
    first: int
    """the number of the first transition that is still there; one more than ``last`` where none is"""
    last: int
    """the number of the last one, 0 if there never was any"""


class Entry(NamedTuple):
    """A step."""

    seq: int
    """the number of its first transition"""
    values: list[bytes]
    """of `HEAD` and `COLUMNS`"""
    size: int
    """how many transitions it has"""


class JournalReader:
    """Reads the journals of an installation. An async context manager; belongs to one event loop."""

    def __init__(self, settings: RedisSettings) -> None:
        """Do no input or output."""
        self._link = Link(settings)
        self.partitions = Partitions(settings.prefix, settings.partitions_of).names

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._link.aclose()

    async def span(self, partition: str) -> Span:
        """Return what is there now. Raises `BackendUnavailable`."""
        epoch, last = await self._ask(partition, "HMGET", f"{partition}:meta", "epoch", "journal_seq")
        head = await self._ask(partition, "XRANGE", _journal(partition), "-", "+", "COUNT", 1)
        number = int(last or 0)
        return Span((epoch or b"").decode(), _number(head[0]) if head else number + 1, number)

    async def at(self, partition: str, time: int) -> int:
        """Return the number of the first step at or after a time (microseconds), one more than the last if none is.

        Times do not fall within a partition, unless its server's clock was set back.
        """
        span = await self.span(partition)
        low, high = span.first, span.last + 1
        while low < high:
            middle = (low + high) // 2
            entry = await self._around(partition, middle)
            if entry is None or int(entry.values[1]) < time:
                low = middle + 1 if entry is None else max(middle + 1, entry.seq + entry.size)
            else:
                high = min(middle, entry.seq)
        return low

    async def time(self, partition: str, number: int) -> int | None:
        """Return when a transition was (microseconds); ``None`` if it is not there."""
        entry = await self._around(partition, number)
        return None if entry is None else int(entry.values[1])

    async def read(self, partition: str, start: int, end: int) -> AsyncIterator[list[Entry]]:
        """Give the entries that have any of the transitions from ``start`` to ``end``, some at a time.

        The first and the last may have others besides. What was cut off is not given: a reader sees that by the numbers.
        """
        first = await self._around(partition, start)
        place = start if first is None else first.seq
        count = 100
        asked = asyncio.ensure_future(self._some(partition, place, end, count))
        try:
            while entries := await asked:
                size = sum(len(value) for entry in entries for value in entry.values)
                last, number = entries[-1], len(entries)
                place = last.seq + last.size
                if number < count or place > end:
                    yield entries
                    return
                count = max(1, min(_MOST, _AT_ONCE * number // max(size, 1)))
                # The next are on their way while these are worked on.
                asked = asyncio.ensure_future(self._some(partition, place, end, count))
                yield entries
        finally:
            asked.cancel()

    async def _some(self, partition: str, start: int, end: int, count: int) -> list[Entry]:
        return _entries(
            await self._ask(
                partition, "XRANGE", _journal(partition), start, f"{end}-1", "COUNT", count
            )
        )

    async def _around(self, partition: str, number: int) -> Entry | None:
        """Return the entry that a transition is in."""
        told = await self._ask(
            partition, "XREVRANGE", _journal(partition), number, "-", "COUNT", 1
        )
        entries = _entries(told)
        if entries and entries[0].seq + entries[0].size > number:
            return entries[0]
        return None

    async def _ask(self, partition: str, *words: str | int) -> Any:
        with translated():
            return await self._link.command(partition, *words)


def _journal(partition: str) -> str:
    return f"{partition}:journal"


def _number(entry: Any) -> int:
    return int(entry[0].partition(b"-")[0])


def _entries(told: Any) -> list[Entry]:
    return [
        Entry(_number(one), one[1][1::2], one[1][15].count(b"\0") + 1) for one in told
    ]
