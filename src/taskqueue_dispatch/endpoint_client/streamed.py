"""Responses that a server streams: server-sent events, or JSON texts on lines of their own. No I/O."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_channel, check_json

_LINE_END = re.compile(rb"\r\n|[\r\n]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DONE = b"[DONE]"
"""text with which some servers end a stream; it is no event"""
_CHANNEL = "data"


class StreamedValue(NamedTuple):
    """A value that a server has streamed."""

    channel: str
    """the name of a server-sent event, if it is one that a channel may have; else ``data``"""
    value: bytes
    """the value as JSON text; text that is not JSON as a JSON string"""


Sink = Callable[[StreamedValue], Awaitable[None]]
"""Function that takes each value when it arrives. The response is not read on before it has returned."""


class TooLongError(Exception):
    """The error if a single value is longer than the limit."""


class StreamReader(Protocol):
    """Splits a response into values."""

    def feed(self, part: bytes, *, last: bool = False) -> Iterator[StreamedValue]:
        """Yield the values that the next part of the response completes. Raises `TooLongError`."""
        ...


class JsonLines:
    """Reads a response whose lines are JSON texts."""

    def __init__(self, limit: int) -> None:
        """Create a reader. ``limit`` is the maximum number of bytes of a line."""
        self._lines = _Lines(limit)

    def feed(self, part: bytes, *, last: bool = False) -> Iterator[StreamedValue]:
        """Yield the values of the lines that the next part completes. Raises `TooLongError`."""
        for line in self._lines.feed(part, last=last):
            if line.strip():
                yield StreamedValue(_CHANNEL, _as_json(line))


class ServerSentEvents:
    """Reads a response of server-sent events. The data of each event is a value, the name of the event its channel."""

    def __init__(self, limit: int) -> None:
        """Create a reader. ``limit`` is the maximum number of bytes of the data of an event."""
        self._lines = _Lines(limit)
        self._limit = limit
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, part: bytes, *, last: bool = False) -> Iterator[StreamedValue]:
        """Yield the values of the events that the next part completes. Raises `TooLongError`."""
        for line in self._lines.feed(part, last=last):
            if line:
                self._read_field(line)
            else:
                yield from self._event()
        if last:
            yield from self._event()

    def _read_field(self, line: bytes) -> None:
        name, _, value = line.removeprefix(_BYTE_ORDER_MARK).partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            self._name = value.decode(errors="replace")
        elif name == b"data":
            self._data.append(value)
            self._size += len(value) + 1
            if self._size > self._limit:
                raise TooLongError

    def _event(self) -> Iterator[StreamedValue]:
        data, name = self._data, self._name
        self._data, self._name, self._size = [], "", 0
        if data and data != [_DONE]:
            yield StreamedValue(_channel_of(name), _as_json(b"\n".join(data)))


READERS: dict[str, Callable[[int], StreamReader]] = {
    "text/event-stream": ServerSentEvents,
    "application/x-ndjson": JsonLines,
    "application/jsonl": JsonLines,
}
"""by media type, what reads a response"""


class _Lines:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._searched = 0

    def feed(self, part: bytes, *, last: bool) -> list[bytes]:
        """Return the lines that this part completes, without their ends."""
        lines: list[bytes] = []
        self._rest += part
        start, at, size = 0, self._searched, len(self._rest)
        while found := _LINE_END.search(self._rest, at):
            if found.end() == size and found[0] == b"\r" and not last:
                break  # the next part may begin with a line feed that belongs to it
            lines.append(bytes(self._rest[start : found.start()]))
            start = at = found.end()
        if last and start < size:
            lines.append(bytes(self._rest[start:]))
            start = size
        del self._rest[:start]
        self._searched = max(0, len(self._rest) - 1)
        if any(len(line) > self._limit for line in (*lines, self._rest)):
            raise TooLongError
        return lines


def _as_json(text: bytes) -> bytes:
    try:
        check_json("event", text, "decoded")
    except InvalidInput:
        return msgspec.json.encode(text.decode(errors="replace"))
    return text


def _channel_of(name: str) -> str:
    try:
        check_channel("event", name)
    except InvalidInput:
        return _CHANNEL
    return name
