"""The journal of the memory backend: JSON lines in files. A shard is a file, and a position is a byte offset.

A file is identified by its first line, whatever its name. All versions of the format can be read; a field that a
version does not have is null. A last line without a line end is ignored, because its writer may still be writing it.
If the file has not changed for some time, a batch read reports that line as damaged.
"""

from __future__ import annotations

import os
import time as clock
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from taskqueue_core.errors import BackendUnavailable
from taskqueue_spark.columns import MISSING, damage
from taskqueue_spark.journals.contract import (
    Choice,
    HistoryMissing,
    Journal,
    Range,
    ReadRange,
    Watch,
)
from taskqueue_spark.journals.files import (
    LONGEST,
    before,
    files_of,
    first_timed,
    line_start,
    opened,
    tag_of,
)
from taskqueue_spark.journals.parsing import ParsedLine, batch_of_lines, lines_of

_BLOCK = 4 * 1024 * 1024
_NO_END = 2**63
_STILL = 5.0
"""seconds without a change after which a last line without a line end counts as damaged"""
_USUAL = 300
"""approximate length of a line, in bytes"""


class LinesJournal(Journal):
    """A reader of journal files, to which a process may still be writing."""

    def __init__(self, path: str, *, torn: bool) -> None:
        """Create the reader without any I/O. ``path``: a file, a folder or a pattern.

        ``torn``: if the file has not changed for `_STILL` seconds, report a last line without a line end as damaged.
        """
        self._path = path.removeprefix("file://")
        self._torn = torn

    def spans(self, *, quick: bool = False) -> dict[str, ReadRange]:  # noqa: ARG002 - ``quick`` has no effect for files
        matches = {}
        for path in files_of(self._path):
            with opened(path) as file:
                matches[path] = ReadRange(tag_of(file), 0, self._end(file))
        return matches

    def after(self, shard: str, position: int, rows: int, end: int) -> int:
        with opened(shard) as file:
            for block in _blocks(file, position, end):
                ends = block.count(b"\n")
                if ends >= rows:
                    slot = 0
                    for _ in range(rows):
                        slot = block.find(b"\n", slot) + 1
                    return position + slot
                rows -= ends
                position += len(block)
        return end

    def mark(self, shard: str, position: int) -> str:  # noqa: ARG002 - files need no marks, because their first lines identify them
        return ""

    def time(self, shard: str, position: int) -> int | None:
        with opened(shard) as file:
            result = first_timed(file, position, _NO_END)
        return None if result is None else result[1]

    def at(self, shard: str, time: int, start: int, end: int) -> int:
        with opened(shard) as file:
            low, high = start, end
            while low < high:
                middle = (low + high) // 2
                results = first_timed(file, line_start(file, middle, high), high)
                if results is None:
                    high = middle
                elif results[1] < time:
                    low = results[2]
                else:
                    high = min(middle, results[0])
            return line_start(file, low, end)

    def rows(self, shard: str, start: int, end: int) -> int:
        with opened(shard) as file:
            return sum(block.count(b"\n") for block in _blocks(file, start, end))

    def split(self, shard: str, start: int, end: int, parts: int) -> list[int]:
        parts = parts or self.parts_for((end - start) // _USUAL)
        with opened(shard) as file:
            indexes = {start, end}
            for part in range(1, parts):
                indexes.add(line_start(file, start + (end - start) * part // parts, end))
            return sorted(indexes)

    def read(self, part: Range, choice: Choice, watch: Watch) -> Iterator[pa.RecordBatch]:
        shard, end = part.shard, part.end
        file = self._open_range(part)
        if file is None:
            if watch is Watch.NOTHING:
                return
            there = Path(shard).exists()
            raise HistoryMissing(
                shard, "another file has this name now" if there else "the file no longer exists"
            )
        with file:
            if watch is not Watch.NOTHING and os.fstat(file.fileno()).st_size < end:
                raise HistoryMissing(shard, f"the file ends before byte {end}")
            reading = _Reading(shard, choice, file, part.start)
            yield from reading.batches(end)
        if watch is Watch.GAPS and reading.gaps:
            gaps = ", ".join(f"{low} to {high} of {run}" for run, low, high in reading.gaps[:5])
            raise HistoryMissing(shard, f"the transitions {gaps} are missing")

    def strays(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:
        file = self._open_range(part) if choice.wants_faults(MISSING) else None
        if file is not None:
            with file:
                last, spoilt = before(file, part.end)
            if spoilt and last is not None:
                yield _behind(part.shard, last, choice)

    def missing(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - no row is needed: later lines show each gap
        return iter(())

    def _open_range(self, part: Range) -> BinaryIO | None:
        """Open the file of a range, even if it was renamed. Return ``None`` if no file with its first line is found."""
        for path in (part.shard, *files_of(self._path)):
            with suppress(BackendUnavailable):
                file = opened(path)
                if not part.run or tag_of(file) == part.run:
                    return file
                file.close()
        return None

    def _end(self, file: BinaryIO) -> int:
        about = os.fstat(file.fileno())
        end = about.st_size
        if self._torn and clock.time() - about.st_mtime > _STILL:
            return end
        while end > 0:
            start = max(0, end - 65_536)
            file.seek(start)
            index = file.read(end - start).rfind(b"\n")
            if index >= 0:
                return start + index + 1
            end = start
        return 0


def _blocks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    while start < end and (block := file.read(min(_BLOCK, end - start))):
        yield block
        start += len(block)


class _Reading:
    """A reader of a range of one file, which also records gaps and damaged lines."""

    def __init__(self, shard: str, choice: Choice, file: BinaryIO, start: int) -> None:
        self._shard, self._choice, self._file, self._start = shard, choice, file, start
        self._everything = choice.everything
        self._last, self._torn = before(file, start)
        self._numbers = {self._last.run: self._last.seq} if self._last and not self._torn else {}
        self._lines: list[ParsedLine] = []
        self._spoilt: list[tuple[int, int, str]] = []
        self._behind: list[ParsedLine] = []
        self.gaps: list[tuple[str, int, int]] = []
        """the run, first number and last number of each gap that no damaged line explains"""

    def batches(self, end: int) -> Iterator[pa.RecordBatch]:
        index, rest = self._start, b""
        self._file.seek(index)
        while True:
            block = self._file.read(min(_BLOCK, end - index - len(rest)))
            data = rest + block
            if not data:
                break
            cut = data.rfind(b"\n") + 1
            if not block or len(data) - cut > LONGEST:
                # Take the rest as one line: it has no line end, or is too long.
                cut = len(data)
            yield from self._lines_at(data[:cut], index)
            index, rest = index + cut, data[cut:]
        yield from self._made(1)

    def _lines_at(self, data: bytes, index: int) -> Iterator[pa.RecordBatch]:
        for lines, spoilt in lines_of(data, index):
            self._count(lines)
            self._lines += lines if self._everything else filter(self._wanted, lines)
            if spoilt:
                time = self._time()
                self._spoilt += [(time, index, why) for index, why in spoilt]
                self._torn = True
                self._numbers = {}  # after a damaged line, any number may follow
            yield from self._made(self._choice.rows)

    def _count(self, lines: list[ParsedLine]) -> None:
        """Record gaps in the numbers, and the last transition of each run that ends with damaged lines."""
        if not lines:
            return
        if self._torn and self._last is not None and self._last.run != lines[0].run:
            self._behind.append(self._last)
        numbers = self._numbers
        for line in lines:
            run, seq = line.run, line.seq
            known = numbers.get(run, seq)
            if seq > known + 1:
                self.gaps.append((run, known + 1, seq - 1))
            if seq >= known:
                numbers[run] = seq
        self._last, self._torn = lines[-1], False

    def _time(self) -> int:
        """Return a time for a damaged line: that of the previous transition, or else of the first one, or else 0."""
        if self._last is not None:
            return self._last.time
        index = self._file.tell()
        results = first_timed(self._file, self._start, _NO_END)
        self._file.seek(index)
        return results[1] if results else 0

    def _wanted(self, line: ParsedLine) -> bool:
        return self._choice.of(line.event, line.key, line.time)

    def _made(self, least: int) -> Iterator[pa.RecordBatch]:
        choice = self._choice
        if len(self._lines) + len(self._spoilt) < least:
            return
        lines, self._lines = self._lines, []
        for start in range(0, len(lines), choice.rows):
            yield batch_of_lines(lines[start : start + choice.rows], choice.schema)
        if self._spoilt and choice.wants_faults():
            rows = [
                (0, time, f"{self._shard}: the line at byte {index} cannot be read: {why}")
                for time, index, why in self._spoilt
            ]
            yield damage(rows, choice.schema)
        if choice.wants_faults(MISSING):
            yield from (_behind(self._shard, last, choice) for last in self._behind)
        self._spoilt, self._behind = [], []


def _behind(shard: str, last: ParsedLine, choice: Choice) -> pa.RecordBatch:
    """Return a row that reports that transitions may be missing after ``last``."""
    text = f"{shard}: the lines after transition {last.seq} cannot be read"
    return damage([(0, last.time, text)], choice.schema, last.run, last.seq + 2)
