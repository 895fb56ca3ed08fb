"""Reading the journal that the scripts write, without affecting servers and workers.

An entry of a partition's journal records a step: the same change of one or more tasks by one script.
The state changes (transitions) of a step have consecutive numbers. The id of the entry in the stream is the first of
these numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias

from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.connection.errors import contract_error
from taskqueue_redis.connection.failures import Failure
from taskqueue_redis.scripts.runner import Arg, Partitions

JOURNAL_VERSION = 2
HEAD = ("v", "ts", "event", "key", "state", "worker", "reason")
"""fields with one value per entry, in this order"""
COLUMNS = (
    "task_id", "attempt", "losses", "priority", "tenant", "ordering_key", "due_at", "error", "digest",
)  # fmt: skip
"""fields after `HEAD`: one value per transition, separated by NUL, or a single value if it is the same for all; the
field ``task_id`` always has all values, and the field ``digest`` exists only if the journal has digests"""
_NAMES = [name.encode() for name in (*HEAD, *COLUMNS)]
_VERSION = str(JOURNAL_VERSION).encode()
_FIELDS = 2 * len(_NAMES)
_WITHOUT_DIGEST = _FIELDS - 2
_IDS = 2 * len(HEAD) + 1
_AT_ONCE = 512 * 1024
"""intended size of a reply in bytes, limited because Redis serves no other client while it creates a reply"""
_MOST = 500
"""maximum number of entries in a reply; each entry takes Redis some microseconds"""
_FIRST = 100
"""maximum number of entries in the first reply; the first request covers twenty times as many numbers"""
_SAMPLE = 20
"""approximate number of entries of a reply from which the average size of its entries is estimated"""


class JournalSpan(NamedTuple):
    """The range of transition numbers in the journal of a partition."""

    epoch: str
    """the partition's id; if it differs from an earlier one, the numbers have begun at 1 again"""
    first: int
    """the number of the first transition that is still stored; ``last`` plus one if none is stored"""
    last: int
    """the number of the last transition, 0 if there has never been a transition"""


class JournalEntry(NamedTuple):
    """An entry of a journal: a step, or a foreign entry, which another program wrote and which has no transitions."""

    seq: int
    """number of the first transition; for a foreign entry, the first half of its id"""
    values: list[bytes]
    """values of the fields `HEAD` and `COLUMNS`; for a foreign entry, only its id"""
    size: int
    """number of transitions in the entry"""


class JournalSteps(NamedTuple):
    """Consecutive steps, stored by column."""

    seqs: Sequence[int]
    """number of the first transition of each step"""
    sizes: Sequence[int]
    """number of transitions of each step"""
    columns: Sequence[Sequence[bytes]]
    """for each field of `HEAD` and `COLUMNS`, the values of all steps"""

    @classmethod
    def of(cls, entries: Iterable[JournalEntry]) -> Self:
        """Convert entries to steps. There must be at least one entry, and no foreign entry."""
        seqs, values, sizes = zip(*entries, strict=True)
        return cls(seqs, sizes, [*zip(*values, strict=True)])

    @classmethod
    def joined(cls, several: Sequence[JournalSteps]) -> Self:
        """Return the concatenation of several `JournalSteps`."""
        seqs, sizes, columns = zip(*several, strict=True)
        return cls(
            [*chain(*seqs)],
            [*chain(*sizes)],
            [[*chain(*parts)] for parts in zip(*columns, strict=True)],
        )

    def part(self, low: int, high: int) -> Self:
        """Return the steps from index ``low`` up to, but not including, index ``high``."""
        columns = [column[low:high] for column in self.columns]
        return type(self)(self.seqs[low:high], self.sizes[low:high], columns)


Reply: TypeAlias = Sequence[tuple[bytes, list[bytes]]]
"""entries of a stream as Redis returns them: each has an id, and a list of alternating fields and values"""


def steps_of(reply: Reply) -> JournalSteps | None:
    """Return the steps of a reply; ``None`` if it is empty or has a foreign entry."""
    if not reply:
        return None
    positions, args = zip(*reply, strict=True)
    lengths = {*map(len, args)}
    if lengths not in ({_FIELDS}, {_WITHOUT_DIGEST}):
        return None
    columns = [*zip(*args, strict=True)]
    names, values, number = columns[::2], columns[1::2], len(reply)
    if lengths == {_WITHOUT_DIGEST}:
        names.append((_NAMES[-1],) * number)
        values.append((b"",) * number)
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
    """Return the entries of a reply, including foreign entries."""
    return [
        JournalEntry(
            int(position[:-2]),
            args[1::2] if len(args) == _FIELDS else [*args[1::2], b""],
            args[_IDS].count(b"\0") + 1,
        )
        if len(args) >= _WITHOUT_DIGEST
        and args[::2] in (_NAMES, _NAMES[:-1])
        and args[1] == _VERSION
        and args[3].isdigit()
        and position[-2:] == b"-0"
        else JournalEntry(int(position.partition(b"-")[0]), [position], 0)
        for position, args in reply
    ]


class _Window(NamedTuple):
    """The range of one request, chosen so that the reply has about the intended size."""

    position: str
    """id at which the range begins"""
    most: int
    """the last number at which an entry of the range may begin"""
    entries: int
    """maximum number of entries"""

    def following(self, reply: Reply, position: str, at_once: int) -> Self:
        """Return the next range, which begins at ``position`` and has a size estimated from ``reply``."""
        number = len(reply)
        batch = reply[:: max(1, number // _SAMPLE)]
        size = max(1, sum(sum(map(len, args)) for _, args in batch) * number // len(batch))
        last, args = reply[-1]
        behind = int(last.partition(b"-")[0])
        behind += args[_IDS].count(b"\0") + 1 if len(args) >= _WITHOUT_DIGEST else 0
        value = max(1, behind - int(reply[0][0].partition(b"-")[0]))
        if position[0] != "(":
            behind = int(position)
        count = max(1, min(at_once, 2 * self.entries, _AT_ONCE * number // size))
        return type(self)(
            position, behind + max(1, min(2 * value, _AT_ONCE * value // size)), count
        )


class StoreReader:
    """Reads an installation without changing it. An async context manager; belongs to one event loop."""

    def __init__(self, settings: RedisSettings) -> None:
        self._client = RedisClient(settings)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def installed(self) -> Partitions:
        """Return the partitions of the installation; if nothing is installed yet, those of the settings."""
        settings = self._client.settings
        partitions = Partitions(settings.prefix, settings.partitions_of)
        first = partitions.names[0]
        number = await self._ask(first, "HGET", f"{first}:meta", "partitions")
        return partitions if number is None else Partitions(settings.prefix, int(number))

    async def _ask(self, partition: str, *args: Arg) -> Any:
        """Run a command and return its reply. Raises the errors of the backend contract."""
        try:
            return await self._client.command(partition, *args)
        except Failure as failure:
            raise contract_error(failure) from failure


class RedisJournalReader(StoreReader):
    """Reads the journals of an installation."""

    def __init__(self, settings: RedisSettings, at_once: int = _MOST) -> None:
        """Create a reader that reads at most ``at_once`` entries per request."""
        super().__init__(settings)
        self._at_once = at_once
        self.partitions = Partitions(settings.prefix, settings.partitions_of).names
        """names of the partitions: those of the settings, until `discover` reads them from the store"""

    async def discover(self) -> tuple[str, ...]:
        """Read the names of the partitions from the store, and return them. Raises `BackendUnavailable`."""
        self.partitions = (await self.installed()).names
        return self.partitions

    async def span(self, partition: str, known: JournalSpan | None = None) -> JournalSpan:
        """Return the range of transition numbers that is stored now. Raises `BackendUnavailable`.

        ``known``: an earlier result; if nothing was added since, it is returned after one short request.
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
        """Return the first number of the first step at or after a time (microseconds), or the last number plus 1.

        ``low`` and ``high`` limit the search, if both are given. Times do not decrease within a partition.
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
        """Return the time of a transition (microseconds); ``None`` if it is not stored."""
        entry = await self._around(partition, number)
        return None if entry is None else int(entry.values[1])

    async def time_from(self, partition: str, number: int) -> int | None:
        """Return the time of the first stored transition at or after a number; ``None`` if there is none."""
        entry = await self._around(partition, number) or await self._next(partition, str(number))
        return None if entry is None else int(entry.values[1])

    async def read(self, partition: str, start: int, end: int) -> AsyncGenerator[Reply]:
        """Yield replies with the entries that contain the transitions from ``start`` - 1 to ``end``.

        The first and the last entry may contain other transitions as well. Deleted entries leave gaps in the numbers.
        Foreign entries appear in the order of their ids.
        """
        # Begin with the transition before `start`, so that the caller can detect an entry that repeats its number.
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
                # Request the next entries while the caller processes these.
                requested = asyncio.ensure_future(self._next_batch(partition, window, end))
                await asyncio.sleep(0)
                yield reply
        finally:
            requested.cancel()

    async def before(self, partition: str, number: int) -> JournalEntry | None:
        """Return the last step that begins at or before a number; ``None`` if there is none."""
        return await self._ours(partition, "XREVRANGE", f"{number}", "-")

    async def strays(self, partition: str, last: int) -> AsyncGenerator[list[bytes]]:
        """Yield, in batches, the ids of foreign entries after a number, such as entries added by a plain XADD."""
        position = str(last + 1)
        while reply := await self._range(partition, position, "+", _FIRST):
            yield [entry.values[0] for entry in entries_of(reply) if not entry.size]
            position = "(" + reply[-1][0].decode()

    async def _next_batch(
        self, partition: str, window: _Window, end: int
    ) -> tuple[Reply, str | None]:
        """Return the entries of a window, and the position at which to continue, or None if there are no more entries.

        If the window is empty, return the next entry after it.
        """
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
        """Return the step that contains a transition; ``None`` if the transition is not stored."""
        entry = await self.before(partition, number)
        return entry if entry is not None and entry.seq + entry.size > number else None

    async def _next(self, partition: str, position: str) -> JournalEntry | None:
        """Return the first step at or after a position."""
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
