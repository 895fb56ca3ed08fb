"""The journal of the memory backend, JSON lines in files: a shard is a file, a position an offset in bytes.

A file is known by its first line. The versions of a line are read side by side: what a version does not have is null.
A last line without an end is not there yet; but if nobody has touched the file for a while, who asks for all that
there is gets it as damage.
"""

from __future__ import annotations

import glob
import hashlib
import os
import time as clock
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import pyarrow as pa

from taskqueue_core.errors import BackendUnavailable
from taskqueue_spark.columns import damage
from taskqueue_spark.journals import Choice, HistoryMissing, Range, Span, Watch, worth
from taskqueue_spark.journals.parsing import Line, batch_of_lines, lines_of, time_of

__all__ = ["LinesJournal"]

_BLOCK = 4 * 1024 * 1024
_LONGEST = 16 * 1024 * 1024
"""bytes of a line beyond which it is none of ours"""
_STILL = 5.0
"""seconds without a change after which a line without an end stays so"""
_USUAL = 300
"""bytes of a line, about"""


class LinesJournal:
    """Reads files that a process appends to, or that are complete."""

    def __init__(self, path: str, *, torn: bool) -> None:
        """Do no input or output. ``path``: a file, a folder or a pattern.

        ``torn``: a last line without an end counts, if the file is still.
        """
        self._path = path.removeprefix("file://")
        self._torn = torn

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def spans(self, *, quick: bool = False) -> dict[str, Span]:  # noqa: ARG002 - it costs little
        found = {}
        for path in _files(self._path):
            with _opened(path) as file:
                found[path] = Span(_tag(file), 0, self._end(file))
        return found

    def after(self, shard: str, position: int, rows: int, end: int) -> int:
        with _opened(shard) as file:
            file.seek(position)
            while position < end and (block := file.read(min(_BLOCK, end - position))):
                ends = block.count(b"\n")
                if ends >= rows:
                    place = 0
                    for _ in range(rows):
                        place = block.find(b"\n", place) + 1
                    return position + place
                rows -= ends
                position += len(block)
        return end

    def time(self, shard: str, position: int) -> int | None:
        with _opened(shard) as file:
            for _, line in _lines_from(file, position):
                if (told := time_of(line)) is not None:
                    return told
        return None

    def at(self, shard: str, time: int, start: int, end: int) -> int:
        with _opened(shard) as file:
            low, high = start, end
            while low < high:
                middle = (low + high) // 2
                told = _first_told(file, _line_start(file, middle, high), high)
                if told is None:
                    high = middle
                elif told[1] < time:
                    low = told[2]
                else:
                    high = min(middle, told[0])
            return _line_start(file, low, end)

    def rows(self, shard: str, start: int, end: int) -> int:
        rows = 0
        with _opened(shard) as file:
            file.seek(start)
            while start < end and (block := file.read(min(_BLOCK, end - start))):
                rows += block.count(b"\n")
                start += len(block)
        return rows

    def split(self, shard: str, start: int, end: int, parts: int) -> list[int]:
        parts = parts or worth((end - start) // _USUAL)
        with _opened(shard) as file:
            places = {start, end}
            for part in range(1, parts):
                places.add(_line_start(file, start + (end - start) * part // parts, end))
            return sorted(places)

    def read(self, part: Range, choice: Choice, watch: Watch) -> Iterator[pa.RecordBatch]:
        shard, run, start, end = part
        try:
            file = _opened(shard)
        except BackendUnavailable:
            if watch is Watch.NOTHING:
                return
            raise HistoryMissing(shard, "the file is gone") from None
        with file:
            if run and _tag(file) != run:
                if watch is not Watch.NOTHING:
                    raise HistoryMissing(shard, "the file was replaced by another")
                return
            if watch is not Watch.NOTHING and os.fstat(file.fileno()).st_size < end:
                raise HistoryMissing(shard, f"the file ends before byte {end}")
            yield from _Reading(shard, choice).batches(file, start, end)

    def strays(self, part: Range, choice: Choice) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - a file ends where it ends
        return iter(())

    def _end(self, file: BinaryIO) -> int:
        about = os.fstat(file.fileno())
        end = about.st_size
        if self._torn and clock.time() - about.st_mtime > _STILL:
            return end
        while end > 0:
            start = max(0, end - 65_536)
            file.seek(start)
            place = file.read(end - start).rfind(b"\n")
            if place >= 0:
                return start + place + 1
            end = start
        return 0


class _Reading:
    """One range of a file."""

    def __init__(self, shard: str, choice: Choice) -> None:
        self._shard = shard
        self._choice = choice
        self._everything = choice.everything
        self._spoilt: list[tuple[int, str]] = []
        self._lines: list[Line] = []
        self._time = 0

    def batches(self, file: BinaryIO, start: int, end: int) -> Iterator[pa.RecordBatch]:
        file.seek(start)
        place, rest = start, b""
        while True:
            block = file.read(min(_BLOCK, end - place - len(rest)))
            data = rest + block
            if not data:
                break
            cut = data.rfind(b"\n") + 1
            if not block or len(data) - cut > _LONGEST:
                cut = len(data)  # its end is not to come, or the line is none
            yield from self._told(data[:cut], place)
            place, rest = place + cut, data[cut:]
        yield from self._made(1)

    def _told(self, data: bytes, place: int) -> Iterator[pa.RecordBatch]:
        for lines, spoilt in lines_of(data, place):
            self._lines += lines if self._everything else filter(self._wanted, lines)
            self._spoilt += spoilt
            yield from self._made(self._choice.rows)

    def _wanted(self, line: Line) -> bool:
        return self._choice.of(line.event, line.key, round(line.ts * 1e6))

    def _made(self, least: int) -> Iterator[pa.RecordBatch]:
        if len(self._lines) + len(self._spoilt) < least:
            return
        lines, self._lines = self._lines, []
        for start in range(0, len(lines), self._choice.rows):
            yield batch_of_lines(lines[start : start + self._choice.rows], self._choice.schema)
        self._time = round(lines[-1].ts * 1e6) if lines else self._time
        if self._spoilt and self._choice.tells():
            rows = [
                (0, self._time, f"{self._shard}: the line at byte {place} cannot be read: {why}")
                for place, why in self._spoilt
            ]
            yield damage(rows, self._choice.schema)
        self._spoilt = []


def _files(path: str) -> list[str]:
    if Path(path).is_dir():
        found = [str(one) for one in Path(path).iterdir() if not one.name.startswith((".", "_"))]
    else:
        found = [path] if Path(path).exists() else glob.glob(path)  # noqa: PTH207 - patterns may be absolute
    return sorted(one for one in found if Path(one).is_file())


def _opened(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise BackendUnavailable(f"{path}: the file cannot be read: {error.strerror}") from error


def _tag(file: BinaryIO) -> str:
    """Return what a file is known by; nothing as long as it has no line."""
    file.seek(0)
    line = file.readline(65_536)
    return hashlib.blake2b(line, digest_size=8).hexdigest() if line.endswith(b"\n") else ""


def _line_start(file: BinaryIO, position: int, end: int) -> int:
    """Return where the first line begins that does so at a position or behind it."""
    if position == 0:
        return 0
    file.seek(position - 1)
    while position <= end and (block := file.read(65_536)):
        found = block.find(b"\n")
        if found >= 0:
            return min(end, position + found)
        position += len(block)
    return end


def _lines_from(file: BinaryIO, position: int) -> Iterator[tuple[int, bytes]]:
    file.seek(position)
    while line := file.readline(_LONGEST):
        yield position, line
        position += len(line)


def _first_told(file: BinaryIO, start: int, end: int) -> tuple[int, int, int] | None:
    """Return where the first line with a time begins, that time, and where it ends."""
    for place, line in _lines_from(file, start):
        if place >= end:
            return None
        if (told := time_of(line)) is not None:
            return place, told, place + len(line)
    return None
