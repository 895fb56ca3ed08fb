"""Checking the digests of journal files, which the memory backend writes with ``TASKQUEUE_MEMORY_JOURNAL_DIGESTS``.

The digest of a line depends on all lines of its run before it. A reader of parts of a file cannot check that, so this
check is a pass of its own over all files, in one process.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from taskqueue_memory.journal import digest_of, with_digest
from taskqueue_spark.journals.files import files_of, lines_from, opened

_SHOWN = 20


class Altered(msgspec.Struct, frozen=True):
    """A line whose digest does not match."""

    file: str
    byte: int
    run: str
    seq: int
    """number of the line; for an end mark, the number that it names"""


class DigestCheck(msgspec.Struct, kw_only=True):
    """The result of a check."""

    lines: int = 0
    """number of lines with a digest"""
    altered: int = 0
    """number of lines whose digest does not match: they or others were changed, removed, renumbered or not written"""
    first: list[Altered] = []
    """the first of these lines"""
    ends: dict[str, str] = {}
    """by run, the last digest, which identifies the whole run; compare it with a copy that is kept elsewhere"""
    unfinished: list[str] = []
    """runs without an end mark: the process still runs, was killed, or the end was cut off"""


class _Line(msgspec.Struct):
    run: str
    seq: int = 0
    end: int = 0
    digest: str = ""


_decoder = msgspec.json.Decoder(_Line)


def check_digests(path: str) -> DigestCheck:
    """Check the digests of all files of a path. Raises `BackendUnavailable`.

    A line after a gap in the numbers, or an end mark after a damaged line, is not compared, because the gap or the
    damage is reported anyway. A line that was read before (of a copied file) is ignored, and so are runs without
    digests.
    """
    result = DigestCheck()
    last: dict[str, tuple[int, str]] = {}
    open_runs: set[str] = set()
    for name in files_of(path):
        damaged = False
        with opened(name) as file:
            for position, raw in lines_from(file, 0):
                if not last and b'"digest":' not in raw:
                    continue
                text = raw.rstrip()
                try:
                    line = _decoder.decode(text)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    damaged = True
                    continue
                number = line.seq or line.end
                seq, before = last.get(line.run, (0, line.run))
                if number < seq or (line.seq and number == seq and line.digest in {before, ""}):
                    continue
                follows = not damaged if line.end else number == seq + 1
                if not (line.digest or before != line.run):
                    continue
                body = text[: text.rfind(b',"digest":"')] + b"}"
                sound = text == with_digest(body, line.digest) and (
                    not follows or line.digest == digest_of(before, body)
                )
                result.lines += 1
                if not sound:
                    result.altered += 1
                    if len(result.first) < _SHOWN:
                        result.first.append(Altered(Path(name).name, position, line.run, number))
                damaged = False
                last[line.run] = number, line.digest
                (open_runs.discard if line.end else open_runs.add)(line.run)
    result.ends = {run: digest for run, (_, digest) in last.items()}
    result.unfinished = sorted(open_runs)
    return result
