"""The journal of the Redis backend: a shard is a partition, and a position is the number of a transition."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from itertools import accumulate, pairwise
from typing import TypeVar

import pyarrow as pa

from taskqueue_redis.config import RedisSettings
from taskqueue_redis.journal.reader import (
    JournalEntry,
    JournalSteps,
    RedisJournalReader,
    Reply,
    entries_of,
    steps_of,
)
from taskqueue_redis.journal.reader import JournalSpan as Numbers
from taskqueue_spark.async_items import items_of
from taskqueue_spark.columns import MISSING, Damaged, batch_of, damage, latest_time
from taskqueue_spark.journals.contract import (
    Choice,
    HistoryMissing,
    Journal,
    Range,
    ReadRange,
    Watch,
)

Result = TypeVar("Result")
_FOREIGN = "it is not a journal entry"


class RedisJournal(Journal):
    """A reader of the journal that the Redis backend writes. It connects when it is first used."""

    def __init__(self, settings: RedisSettings, at_once: int) -> None:
        """Create the reader without any I/O. ``at_once``: maximum number of entries in one reply from Redis."""
        self._reader = RedisJournalReader(settings, at_once)
        self._discovered = False
        self._runner = asyncio.Runner()
        self._known: dict[str, Numbers] = {}

    def close(self) -> None:
        with self._runner as runner:
            runner.run(self._reader.__aexit__(None, None, None))

    def _run(self, work: Callable[[RedisJournalReader], Awaitable[Result]]) -> Result:
        async def worked() -> Result:
            if not self._discovered:
                await self._reader.discover()
                self._discovered = True
            return await work(self._reader)

        return self._runner.run(worked())

    def spans(self, *, quick: bool = False) -> dict[str, ReadRange]:
        known = self._known if quick else {}
        installed = any(span.epoch for span in self._known.values())

        async def ask(reader: RedisJournalReader) -> list[Numbers]:
            if not installed:
                await reader.discover()
            return await asyncio.gather(
                *(reader.span(name, known.get(name)) for name in reader.partitions)
            )

        numbers = self._run(ask)
        self._known = dict(zip(self._reader.partitions, numbers, strict=True))
        return {
            name: ReadRange(span.epoch, span.first, span.last + 1)
            for name, span in self._known.items()
        }

    def after(self, shard: str, position: int, rows: int, end: int) -> int:  # noqa: ARG002 - the result is the same for every shard
        return min(position + rows, end)

    def mark(self, shard: str, position: int) -> str:
        time = self._run(lambda reader: reader.time(shard, position - 1))
        return "" if time is None else str(time)

    def time(self, shard: str, position: int) -> int | None:
        return self._run(lambda reader: reader.time_from(shard, position))

    def at(self, shard: str, time: int, start: int, end: int) -> int:
        return self._run(lambda reader: reader.at(shard, time, start, end))

    def rows(self, shard: str, start: int, end: int) -> int:  # noqa: ARG002 - the result is the same for every shard
        return end - start

    def split(self, shard: str, start: int, end: int, parts: int) -> list[int]:  # noqa: ARG002 - the result is the same for every shard
        parts = parts or self.parts_for(end - start)
        return [start + (end - start) * part // parts for part in range(parts + 1)]

    def read(self, part: Range, choice: Choice, watch: Watch) -> Iterator[pa.RecordBatch]:
        shard, run, start, end, mark = part
        if self._span(shard).epoch != run:
            if watch is not Watch.NOTHING:
                raise HistoryMissing(shard, "the store was emptied, so its numbers start again")
            return
        number = self._reader.partitions.index(shard)
        if mark and self.mark(shard, start) not in {mark, ""}:
            text = "the store lost transitions that were already read, and reuses their numbers"
            if watch is not Watch.NOTHING:
                raise HistoryMissing(shard, text)
            if choice.wants_faults():
                time = _sound(int(mark)) if mark.isdecimal() else 0
                yield damage([(number, time, f"{shard}: {text}")], choice.schema)
        observed = _ReadState(part, number, choice, lambda: self.time(shard, start) or 0)
        replies = items_of(self._runner, self._reader.read(shard, start, end - 1))
        with closing(replies):
            for reply in replies:
                yield from observed.batches(reply)
        yield from observed.rest()
        if watch in {Watch.CUT, Watch.GAPS} and (missing := observed.missing):
            first = self._span(shard).first
            cut = [gap for gap in missing if watch is Watch.GAPS or gap[0] < first]
            if cut:
                gaps = ", ".join(f"{low} to {high}" for low, high in cut[:5])
                raise HistoryMissing(shard, f"the transitions {gaps} no longer exist")

    def strays(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        shard, run = part.shard, part.run
        span = self._span(shard)
        if not choice.wants_faults() or span.epoch != run:
            return
        number, time = self._reader.partitions.index(shard), self._last(shard, span.last)[1]
        groups = items_of(self._runner, self._reader.strays(shard, span.last))
        with closing(groups):
            for positions in groups:
                texts = (_fault_text(shard, where.decode(), _FOREIGN) for where in positions)
                yield damage([(number, time, text) for text in texts], choice.schema)

    def missing(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        shard, run, start, end, _ = part
        if not choice.wants_faults(MISSING) or self._span(shard).epoch != run:
            return
        last, time = self._last(shard, end - 1)
        low = max(last + 1, start)
        if low < end:
            text = f"{shard}: the transitions {low} to {end - 1} are missing"
            row = self._reader.partitions.index(shard), time, text
            yield damage([row], choice.schema, run, end)

    def _span(self, shard: str) -> Numbers:
        return self._run(lambda reader: reader.span(shard))

    def _last(self, shard: str, number: int) -> tuple[int, int]:
        """Return the sequence number and time of the last transition at or before ``number``; zeros if none exists."""
        entry = self._run(lambda reader: reader.before(shard, number))
        if entry is None:
            return 0, 0
        return entry.seq + entry.size - 1, _sound(int(entry.values[1]))


def _sound(time: int) -> int:
    return time if time < latest_time() else 0


def _fault_text(shard: str, position: str, why: str) -> str:
    return f"{shard}: entry {position} cannot be read: {why}"


class _ReadState:
    """A builder of batches from the entries of a range, which also records the numbers that are missing."""

    def __init__(self, part: Range, number: int, choice: Choice, began: Callable[[], int]) -> None:
        self._shard, self._run, self._start, self._end, _ = part
        self._number, self._choice, self._began = number, choice, began
        self._everything = choice.everything
        self._kept: list[JournalSteps] = []
        self._damage: list[str] = []
        self._rows = 0
        self._time = 0
        self._expected = part.start
        self._excused = False
        self.missing: list[tuple[int, int]] = []
        """first and last number of each gap that no damaged entry explains"""

    def batches(self, reply: Reply) -> Iterator[pa.RecordBatch]:
        """Add the entries of a reply, and yield batches once there are enough rows."""
        steps = steps_of(reply) if self._everything else None
        if steps is not None and self._in_line(steps):
            self._kept.append(steps)
            end = steps.seqs[-1] + steps.sizes[-1]
            self._rows += end - self._expected
            self._expected, self._excused = end, False
        else:
            self._take(entries_of(reply))
        if self._rows + len(self._damage) >= self._choice.rows:
            yield from self._made()

    def _in_line(self, steps: JournalSteps) -> bool:
        """Return whether steps continue the numbers read so far without a gap."""
        return [*accumulate(steps.sizes, initial=self._expected)][:-1] == steps.seqs

    def _take(self, entries: list[JournalEntry]) -> None:
        retained = []
        for entry in entries:
            seq, values, size = entry
            if not size or self._start < self._expected > seq:
                why = "its numbers belong to another entry" if size else _FOREIGN
                self._spoilt(seq, why, values[0] if not size else b"")
                self._excused = True
                continue
            if seq > self._expected and not self._excused:
                self.missing.append((self._expected, seq - 1))
            self._expected, self._excused = seq + size, False
            if self._everything or self._wanted(values):
                retained.append(entry)
                self._rows += size
        if retained:
            self._kept.append(JournalSteps.of(retained))

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows, and record a gap at the end of the range."""
        yield from self._made()
        if self._expected < self._end and not self._excused:
            self.missing.append((self._expected, self._end - 1))

    def _wanted(self, values: list[bytes]) -> bool:
        try:
            return self._choice.of(values[2].decode(), values[3].decode(), int(values[1]))
        except ValueError:
            # Keep an entry with invalid values: it is reported when the batch is built.
            return True

    def _made(self) -> Iterator[pa.RecordBatch]:
        batches, self._kept, self._rows = self._kept, [], 0
        if batches:
            yield from self._sound(JournalSteps.joined(batches))
        if self._damage:
            self._time = self._time or _sound(self._began())
            rows = [(self._number, self._time, text) for text in self._damage]
            self._damage = []
            yield damage(rows, self._choice.schema)

    def _sound(self, steps: JournalSteps) -> Iterator[pa.RecordBatch]:
        last = self._end - 1
        try:
            batch = batch_of(
                self._number, self._run, steps, self._start, last, schema=self._choice.schema
            )
        except Damaged as error:
            number = len(steps.seqs)
            middle = number // 2
            if middle == 0:
                self._spoilt(steps.seqs[0], str(error))
                return
            yield from self._sound(steps.part(0, middle))
            yield from self._sound(steps.part(middle, number))
        else:
            self._time = int(steps.columns[1][-1])
            # Divide the batch, because one reply may have more rows than one batch may have.
            number = len(batch)
            pieces = max(1, round(number / self._choice.rows))
            for low, high in pairwise(number * n // pieces for n in range(pieces + 1)):
                if low < high:
                    yield batch.slice(low, high - low)

    def _spoilt(self, seq: int, why: str, position: bytes = b"") -> None:
        # Ignore an entry that begins before the range, because it belongs to the previous range.
        if seq >= self._start and self._choice.wants_faults():
            self._damage.append(_fault_text(self._shard, position.decode() or f"{seq}-0", why))
