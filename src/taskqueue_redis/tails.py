"""The newest events of running tasks, as messages of Redis have brought them: a reader that follows needs no stream.

Only readers that wait make this process listen to the messages of a task, and all of them share its tail.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from struct import Struct

from taskqueue_core.authoring.event_streams import events_after, page_of, size_of
from taskqueue_core.capabilities import Event, EventKind, EventPage, Position
from taskqueue_redis.scripts.runner import seconds

_KINDS = (
    EventKind.ATTEMPT,
    EventKind.DATA,
    EventKind.PROGRESS,
    EventKind.STATE,
    EventKind.END,
)
"""kinds of events in the order of their numbers in scripts, which begin with 1"""
_CHANNEL = 29
"""number of bytes before the channel in the first field of an entry, see `events.lua`"""
_BYTES = 16 * 1024
"""number of bytes of events that a tail has at most, besides the newest one"""
_OVERHEAD = 128
"""number of bytes for which an event counts besides its value"""
_LENGTH = 4
"""number of bytes of a length in a message"""
_LENGTHS = Struct(">III")
"""the lengths before an event in a message"""
_TRUST = 10.0
"""seconds after a message in which a tail without newer events means that there are none: a message may be lost"""


def event_of(place: bytes, meta: bytes, value: bytes) -> Event:
    """Return the event in an entry of a stream: its id and its two fields."""
    kind = _KINDS[meta[0] - 1]
    return Event(
        id=place.decode(),
        kind=kind,
        channel=meta[_CHANNEL:].decode() if kind is EventKind.DATA else None,
        value=value,
        at=seconds(int.from_bytes(meta[1:8])),
    )


class Tails:
    """The tails by the channels of their messages."""

    def __init__(self) -> None:
        self._tails: dict[str, _Tail] = {}

    def hear(self, channel: str, message: bytes) -> None:
        """Note a message: what was added to the stream of a task. It is empty if the events are large."""
        if not message:
            self.forget(channel)
            return
        first = _LENGTH + int.from_bytes(message[:_LENGTH])
        start = Position.read(message[_LENGTH:first].decode())
        assert start is not None  # noqa: S101 - it is None only for None
        tail = self._tails.get(channel)
        # If it ends elsewhere, a message is missing, or the task has another stream.
        if tail is None or tail.end != start:
            tail = self._tails[channel] = _Tail(start)
        tail.add(tuple(_events(message, first)), time.monotonic())

    def page(self, channel: str, after: Position, limit: int) -> EventPage | None:
        """Return the events after a position, an empty page if there are none; ``None`` if that is unknown."""
        tail = self._tails.get(channel)
        return None if tail is None else tail.page(after, limit, time.monotonic())

    def forget(self, channel: str) -> None:
        """Forget a tail, because messages are missing or no more of them are awaited."""
        self._tails.pop(channel, None)

    def clear(self) -> None:
        """Forget all tails."""
        self._tails.clear()


class _Tail:
    """The events of a stream from the one after ``start`` to the one at ``end``."""

    def __init__(self, start: Position) -> None:
        self.start = self.end = start
        self.events: deque[Event] = deque()
        self.size = 0
        self.heard = 0.0

    def add(self, events: Sequence[Event], now: float) -> None:
        self.heard = now
        self.events += events
        self.end = Position.read(events[-1].id) or self.end
        self.size += sum(_OVERHEAD + size_of(event) for event in events)
        while self.size > _BYTES and len(self.events) > 1:
            oldest = self.events.popleft()
            self.size -= _OVERHEAD + size_of(oldest)
            self.start = Position.read(oldest.id) or self.start

    def page(self, after: Position, limit: int, now: float) -> EventPage | None:
        if not self.start <= after <= self.end:
            return None
        if after < self.end:
            return page_of(events_after(self.events, after, limit), after)
        if now > self.heard + _TRUST or self.events[-1].kind is EventKind.END:
            return None
        return EventPage(next=after.id)


def _events(message: bytes, at: int) -> Iterator[Event]:
    """Yield the events in a message from the byte ``at`` on."""
    while at < len(message):
        lengths = _LENGTHS.unpack_from(message, at)
        start = at + _LENGTHS.size
        meta = start + lengths[0]
        value = meta + lengths[1]
        at = value + lengths[2]
        yield event_of(message[start:meta], message[meta:value], message[value:at])
