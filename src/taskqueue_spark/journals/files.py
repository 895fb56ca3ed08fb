"""Journal files with one JSON object per line: finding lines, and identifying files."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from taskqueue_core.errors import BackendUnavailable
from taskqueue_spark.journals.parsing import ParsedLine, line_of, time_of

_BLOCK = 65_536
LONGEST = 16 * 1024 * 1024
"""maximum length of a line, in bytes"""


def files_of(path: str) -> list[str]:
    """Return the files of a path, which is a file, a pattern or a folder (without names that begin with "." or "_")."""
    if Path(path).is_dir():
        matches = [
            str(path) for path in Path(path).iterdir() if not path.name.startswith((".", "_"))
        ]
    else:
        matches = [path] if Path(path).exists() else glob.glob(path)  # noqa: PTH207 - `Path.glob` refuses absolute patterns
    return sorted(name for name in matches if Path(name).is_file())


def opened(path: str) -> BinaryIO:
    """Open a file for reading. Raises `BackendUnavailable`."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise BackendUnavailable(f"{path}: the file cannot be read: {error.strerror}") from error


def tag_of(file: BinaryIO) -> str:
    """Return the identifier of a file: a digest of its first line, or empty if there is no complete line yet."""
    file.seek(0)
    line = file.readline(_BLOCK)
    return hashlib.blake2b(line, digest_size=8).hexdigest() if line.endswith(b"\n") else ""


def line_start(file: BinaryIO, position: int, end: int) -> int:
    """Return the start of the first line that begins between ``position`` and ``end``; ``end`` if there is none."""
    if position == 0:
        return 0
    file.seek(position - 1)
    while position <= end and (block := file.read(_BLOCK)):
        result = block.find(b"\n")
        if result >= 0:
            return min(end, position + result)
        position += len(block)
    return end


def lines_from(file: BinaryIO, position: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines from a position on, each with the position at which it begins."""
    file.seek(position)
    while line := file.readline(LONGEST):
        yield position, line
        position += len(line)


def first_timed(file: BinaryIO, start: int, end: int) -> tuple[int, int, int] | None:
    """Return the start, time and end of the first line with a time; ``None`` if there is none before ``end``."""
    for index, line in lines_from(file, start):
        if index >= end:
            return None
        if (value := time_of(line)) is not None:
            return index, value, index + len(line)
    return None


def before(file: BinaryIO, position: int) -> tuple[ParsedLine | None, bool]:
    """Return the last transition before a position (``None`` if not found), and whether damaged lines follow it.

    The search covers about `LONGEST` bytes before the position.
    """
    spoilt = False
    end, rest = position, b""
    while end > 0 and position - end < LONGEST:
        start = max(0, end - _BLOCK)
        file.seek(start)
        data = file.read(end - start) + rest
        cut = data.find(b"\n") + 1 if start else 0
        rest, end = data[:cut], start
        if start and not cut:
            rest = data
            continue
        *lines, last = data[cut:].split(b"\n")
        spoilt = spoilt or bool(last.strip())
        for raw in reversed(lines):
            line, why = line_of(raw + b"\n")
            if line is not None:
                return line, spoilt
            spoilt = spoilt or bool(why)
    return None, spoilt
