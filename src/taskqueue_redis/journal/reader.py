"""Reading the journal that the scripts write, without touching what servers and workers use.

An entry of a partition's journal tells what one step did to some tasks; its transitions have numbers without gaps,
of which the stream's id is the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias

from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.client import Link
from taskqueue_redis.connection.errors import contract_error
from taskqueue_redis.connection.failures import Failure
from taskqueue_redis.scripts.runner import Arg, Partitions


async def command(client: Link, key: str, *args: Arg) -> Any:
    """Run a command and return its reply. Raises the contract's errors."""
    try:
        return await client.command(key, *args)
    except Failure as failure:
        raise contract_error(failure) from failure


async def installed(client: Link) -> Partitions:
    """Return the partitions that there are; where nothing is installed yet, what the settings say.

    Raises `BackendUnavailable`.
    """
    partitions = Partitions(client.settings.prefix, client.settings.partitions_of)
    first = partitions.names[0]
    number = await command(client, first, "HGET", f"{first}:meta", "partitions")
    return partitions if number is None else Partitions(client.settings.prefix, int(number))


JOURNAL_VERSION = 2
HEAD = ("v", "ts", "event", "key", "state", "worker", "reason")
"""fields that an entry has once, in this order"""
COLUMNS = (
    "task_id", "attempt", "losses", "priority", "tenant", "ordering_key", "due_at", "error",
)  # fmt: skip
"""fields behind these: a value per transition with NUL between them, or (but for the ids) one for all"""
_NAMES = [name.encode() for name in (*HEAD, *COLUMNS)]
_VERSION = str(JOURNAL_VERSION).encode()
_FIELDS = 2 * len(_NAMES)
_IDS = 2 * len(HEAD) + 1
_AT_ONCE = 512 * 1024
"""bytes that a reply is meant to have: Redis serves nobody else while it writes one"""
_MOST = 500
"""entries in a reply, each of which takes Redis some microseconds"""
_FIRST = 100
"""entries in the first reply, which has the numbers of twenty times as many"""
_SAMPLE = 20
"""entries whose size is taken for that of all"""


class JournalSpan(NamedTuple):
    """What a partition's journal has."""

    epoch: str
    """of the installation: another one begins to count anew"""
    first: int
    """the number of the first transition that is still there; one more than ``last`` where none is"""
    last: int
    """the number of the last one, 0 if there never was any"""


class JournalEntry(NamedTuple):
    """A step; or what a foreign hand has written, which has no transitions."""

    seq: int
    """the number of its first transition; of a foreign one, the first half of its id"""
    values: list[bytes]
    """of `HEAD` and `COLUMNS`; of a foreign one, its id alone"""
    size: int
    """how many transitions it has"""


class JournalSteps(NamedTuple):
    """Some steps after one another, by column."""

    seqs: Sequence[int]
    """the number of the first transition of each"""
    sizes: Sequence[int]
    """how many transitions each has"""
    columns: Sequence[Sequence[bytes]]
    """of `HEAD` and `COLUMNS`, each with a value per step"""

    @classmethod
    def of(cls, entries: Iterable[JournalEntry]) -> Self:
        """Return entries, none of them foreign, and at least one."""
        seqs, values, sizes = zip(*entries, strict=True)
        return cls(seqs, sizes, [*zip(*values, strict=True)])

    @classmethod
    def joined(cls, several: Sequence[JournalSteps]) -> Self:
        """Return what stands in several, as one."""
        seqs, sizes, columns = zip(*several, strict=True)
        return cls(
            [*chain(*seqs)],
            [*chain(*sizes)],
            [[*chain(*parts)] for parts in zip(*columns, strict=True)],
        )

    def part(self, low: int, high: int) -> Self:
        """Return the steps from a place to before another, places counted from 0."""
        columns = [column[low:high] for column in self.columns]
        return type(self)(self.seqs[low:high], self.sizes[low:high], columns)


Reply: TypeAlias = Sequence[tuple[bytes, list[bytes]]]
"""entries of a stream as Redis tells them: their ids and their words"""


def steps_of(reply: Reply) -> JournalSteps | None:
    """Return what a reply tells, all at once; ``None`` where not everything of it is ours, or there is nothing."""
    if not reply:
        return None
    positions, args = zip(*reply, strict=True)
    if {*map(len, args)} != {_FIELDS}:
        return None
    columns = [*zip(*args, strict=True)]
    names, values, number = columns[::2], columns[1::2], len(reply)
    ids = b" ".join(positions)
    if (
        ids.count(b"-0 ") != number - 1
        or not ids.endswith(b"-0")
        or any(reply.count(name) != number for reply, name in zip(names, _NAMES, strict=True))
        or values[0].count(_VERSION) != number
        or not all(map(bytes.isdigit, values[1]))
    ):
        return None
    tasks = values[len(HEAD)]
    sizes = (
        [1] * number if b"\0" not in b"".join(tasks) else [each.count(b"\0") + 1 for each in tasks]
    )
    return JournalSteps([*map(int, ids[:-2].split(b"-0 "))], sizes, values)


def entries_of(reply: Reply) -> list[JournalEntry]:
    """Return what a reply tells, entry by entry."""
    return [
        JournalEntry(int(position[:-2]), args[1::2], args[_IDS].count(b"\0") + 1)
        if len(args) == _FIELDS
        and args[::2] == _NAMES
        and args[1] == _VERSION
        and args[3].isdigit()
        and position[-2:] == b"-0"
        else JournalEntry(int(position.partition(b"-")[0]), [position], 0)
        for position, args in reply
    ]


class _Window(NamedTuple):
    """What is asked for at once, so that the reply has about as many bytes as it is meant to have."""

    position: str
    """where it begins"""
    most: int
    """no entry in it begins behind this number"""
    entries: int
    """how many at most"""

    def following(self, reply: Reply, position: str, at_once: int) -> Self:
        """Return the one behind a reply, from a place on: at most twice as much, as the next may be larger."""
        number = len(reply)
        batch = reply[:: max(1, number // _SAMPLE)]
        size = max(1, sum(sum(map(len, args)) for _, args in batch) * number // len(batch))
        last, args = reply[-1]
        behind = int(last.partition(b"-")[0])
        behind += args[_IDS].count(b"\0") + 1 if len(args) == _FIELDS else 0
        value = max(1, behind - int(reply[0][0].partition(b"-")[0]))
        if position[0] != "(":
            behind = int(position)
        count = max(1, min(at_once, 2 * self.entries, _AT_ONCE * number // size))
        return type(self)(
            position, behind + max(1, min(2 * value, _AT_ONCE * value // size)), count
        )


class StoreReader:
    """Reads an installation without scripts. An async context manager; belongs to one event loop."""

    def __init__(self, settings: RedisSettings) -> None:
        """Do no input or output."""
        self._client = Link(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def _ask(self, partition: str, *args: Arg) -> Any:
        return await command(self._client, partition, *args)


class RedisJournalReader(StoreReader):
    """Reads the journals of an installation."""

    def __init__(self, settings: RedisSettings, at_once: int = _MOST) -> None:
        """Do no input or output. ``at_once``: the most entries in a reply."""
        super().__init__(settings)
        self._at_once = at_once
        self.partitions = Partitions(settings.prefix, settings.partitions_of).names
        """as the settings say; `discover` asks the store"""

    async def discover(self) -> tuple[str, ...]:
        """Return the partitions that the installation has, as far as there is one. Raises `BackendUnavailable`."""
        self.partitions = (await installed(self._client)).names
        return self.partitions

    async def span(self, partition: str, known: JournalSpan | None = None) -> JournalSpan:
        """Return what is there now. Raises `BackendUnavailable`.

        ``known``: what was there before; if nothing has come since, that is the answer, and costs least.
        """
        reply = await self._ask(partition, "HMGET", f"{partition}:meta", "epoch", "journal_seq")
        epoch, number = reply[0] or b"", int(reply[1] or 0)
        if known is not None and (known.epoch.encode(), known.last) == (epoch, number):
            return known
        head = await self._next(partition, "-")
        first = number + 1 if head is None else min(head.seq, number + 1)
        return JournalSpan(epoch.decode(), first, number)

    async def at(
        self, partition: str, time: int, low: int | None = None, high: int | None = None
    ) -> int:
        """Return the number of the first step at or after a time (microseconds), one more than the last if none is.

        ``low``, ``high``: between which numbers it is to be found. Times do not fall within a partition, unless its
        server's clock was set back.
        """
        if low is None or high is None:
            span = await self.span(partition)
            low, high = span.first, span.last + 1
        while low < high:
            middle = (low + high) // 2
            entry = await self.before(partition, middle)
            if entry is None or int(entry.values[1]) < time:
                low = middle + 1 if entry is None else max(middle + 1, entry.seq + entry.size)
            else:
                high = max(low, min(middle, entry.seq))
        return low

    async def time(self, partition: str, number: int) -> int | None:
        """Return when a transition was (microseconds); ``None`` if it is not there."""
        entry = await self._around(partition, number)
        return None if entry is None else int(entry.values[1])

    async def time_from(self, partition: str, number: int) -> int | None:
        """Return when the first transition was that is there from a number on; ``None`` if none is."""
        entry = await self._around(partition, number) or await self._next(partition, str(number))
        return None if entry is None else int(entry.values[1])

    async def read(self, partition: str, start: int, end: int) -> AsyncGenerator[Reply]:
        """Give replies with the entries that have any of the transitions from ``start`` to ``end``, some at a time.

        The first and the last may have others besides. What was cut off is not given: a reader sees that by
        the numbers.
        Foreign entries are given where their ids stand.
        """
        # An entry that has the numbers of the one before it is known by what comes before.
        first = await self._around(partition, start - 1) or await self._around(partition, start)
        low = start if first is None else first.seq
        window = _Window(str(low), low + 20 * _FIRST, min(_FIRST, self._at_once))
        requested = asyncio.ensure_future(self._next_batch(partition, window, end))
        try:
            while True:
                reply, position = await requested
                if position is None:
                    if reply:
                        yield reply
                    return
                window = window.following(reply, position, self._at_once)
                # The next are on their way while these are worked on.
                requested = asyncio.ensure_future(self._next_batch(partition, window, end))
                await asyncio.sleep(0)
                yield reply
        finally:
            requested.cancel()

    async def before(self, partition: str, number: int) -> JournalEntry | None:
        """Return the last entry that begins with a number or before it; ``None`` if there is none."""
        return await self._ours(partition, "XREVRANGE", f"{number}", "-")

    async def strays(self, partition: str, last: int) -> AsyncGenerator[list[bytes]]:
        """Give the ids of foreign entries that are beyond a number, as those of a plain XADD are; some at a time."""
        position = str(last + 1)
        while reply := await self._range(partition, position, "+", _FIRST):
            yield [entry.values[0] for entry in entries_of(reply) if not entry.size]
            position = "(" + reply[-1][0].decode()

    async def _next_batch(
        self, partition: str, window: _Window, end: int
    ) -> tuple[Reply, str | None]:
        """Return what a window has, else what comes next; and where it goes on, ``None`` at the end."""
        most, count = min(window.most, end), window.entries
        reply = await self._range(partition, window.position, most, count)
        if not reply and most < end:
            reply, count = await self._range(partition, str(most + 1), end, 1), 1
        if len(reply) == count:
            return reply, "(" + reply[-1][0].decode()
        return reply, str(most + 1) if reply and most < end else None

    async def _range(self, partition: str, start: str, end: int | str, count: int) -> Reply:
        reply: Reply = await self._ask(
            partition, "XRANGE", _journal(partition), start, end, "COUNT", count
        )
        return reply

    async def _around(self, partition: str, number: int) -> JournalEntry | None:
        """Return the entry that a transition is in."""
        entry = await self.before(partition, number)
        return entry if entry is not None and entry.seq + entry.size > number else None

    async def _next(self, partition: str, position: str) -> JournalEntry | None:
        """Return the first entry from a place on."""
        return await self._ours(partition, "XRANGE", position, "+")

    async def _ours(self, partition: str, verb: str, start: str, end: str) -> JournalEntry | None:
        count = 1
        while reply := await self._ask(
            partition, verb, _journal(partition), start, end, "COUNT", count
        ):
            for entry in entries_of(reply):
                if entry.size:
                    return entry
            if len(reply) < count:
                break
            start, count = "(" + reply[-1][0].decode(), 100
        return None


def _journal(partition: str) -> str:
    return f"{partition}:journal"
