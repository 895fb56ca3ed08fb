"""Decoding JSON lines into transitions, and the reasons why lines cannot be decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
import pyarrow as pa
from msgspec import Meta

from taskqueue_spark.columns import BEYOND, TRANSITIONS, After, Event, latest_time

_Time = Annotated[float, Meta(ge=0, lt=BEYOND / 1e6)]
_Int32 = Annotated[int, Meta(ge=0, lt=2**31)]
_BEGIN = b'{"v":'
_AT_ONCE = 2_500_000
"""approximate number of bytes that are decoded at once"""
_FUTURE = "its time is in the future"
Spoilt = list[tuple[int, str]]


class ParsedLine(msgspec.Struct, kw_only=True, gc=False):
    """One transition in a journal file, in any version of the format."""

    v: Literal[1, 2]
    run: Annotated[str, Meta(min_length=1)]
    seq: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    ts: _Time
    event: Event
    key: str
    task_id: str
    attempt: _Int32
    losses: _Int32
    state: After
    priority: Annotated[int, Meta(ge=-128, lt=128)]
    tenant: str | None
    worker: str | None
    error: str | None
    reason: str | None
    ordering_key: str | None = None
    due_at: _Time | None = None
    digest: str | None = None

    @property
    def time(self) -> int:
        """The time in microseconds since 1970."""
        return round(self.ts * 1e6)


_decoder = msgspec.json.Decoder(ParsedLine)
_NONE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def lines_of(data: bytes, index: int) -> Iterator[tuple[list[ParsedLine], Spoilt]]:
    """Yield groups of lines: some transitions, then the offset and fault of each damaged line that follows them.

    ``index``: the byte offset of the first line. Blank lines are ignored.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _AT_ONCE) + 1 or len(data)
        try:
            lines = _decoder.decode_lines(data[start:end]) if data[end - 1 : end] == b"\n" else None
        except _NONE:
            lines = None
        if lines is not None and max((line.ts for line in lines), default=0) * 1e6 < latest_time():
            yield lines, []
        else:
            yield from _one_by_one(data[start:end], index + start)
        start = end


def _one_by_one(data: bytes, index: int) -> Iterator[tuple[list[ParsedLine], Spoilt]]:
    lines: list[ParsedLine] = []
    spoilt: Spoilt = []
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        line, why = line_of(data[start:end])
        if why:
            spoilt.append((index + start, why))
        if line is not None:
            if spoilt:
                yield lines, spoilt
                lines, spoilt = [], []
            lines.append(line)
        start = end
    yield lines, spoilt


def line_of(raw: bytes) -> tuple[ParsedLine | None, str]:
    """Return the transition of a line (``None`` if it has none), and the fault of the line (empty if it has none)."""
    if not raw.strip():
        return None, ""
    if not raw.endswith(b"\n"):
        return None, "it has no line end"
    try:
        return _decoded(raw), ""
    except _NONE as error:
        why = _why(error)
    # If a process is killed while it writes a line, the next process appends to the incomplete line. Try to decode what
    # the next process wrote.
    again = raw.rfind(_BEGIN)
    if again > 0:
        with suppress(*_NONE):
            return _decoded(raw[again:]), why
    return None, why


def _decoded(raw: bytes) -> ParsedLine:
    line = _decoder.decode(raw)
    if line.time >= latest_time():
        raise msgspec.ValidationError(_FUTURE)
    return line


def _why(error: Exception) -> str:
    # Do not return the message of msgspec, because the message may quote a value.
    text = str(error)
    if text == _FUTURE:
        return text
    if isinstance(error, msgspec.ValidationError | RecursionError):
        return f"it is not a transition{text[text.rindex(' - at ') :] if ' - at ' in text else ''}"
    return "it is not JSON"


def time_of(line: bytes) -> int | None:
    """Return the time of a line (microseconds since 1970); ``None`` if the line is not a transition."""
    result, _ = line_of(line)
    return None if result is None else result.time


def batch_of_lines(lines: Sequence[ParsedLine], schema: pa.Schema = TRANSITIONS) -> pa.RecordBatch:
    """Return an Arrow batch of lines. ``schema``: the columns to return, all or some of `TRANSITIONS`."""
    columns = [_column(lines, field.name, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(lines: Sequence[ParsedLine], name: str, kind: pa.DataType) -> pa.Array:
    if name == "shard":
        return pa.repeat(pa.scalar(0, kind), len(lines))
    values: list[Any] = [getattr(line, name) for line in lines]
    if pa.types.is_timestamp(kind):
        whole = [None if value is None else round(value * 1e6) for value in values]
        return pa.array(whole, pa.int64()).cast(kind)
    return pa.array(values, kind)
