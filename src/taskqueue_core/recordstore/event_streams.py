"""Streams of events in a `RecordStore`.

The store keeps these links, where a stream has a random name, which is in the record of its task (`Record.stream`):

- ``stream NAME``: what is known of a stream besides its events.
- ``event NAME ATTEMPT NUMBER``: an event.
- ``left NAME``: a stream that no task has any more, so that its events are to be deleted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

import msgspec

from taskqueue_core.authoring.event_streams import EventStream, page_of
from taskqueue_core.capabilities import Event, EventKind, EventPage, NewEvents, Position
from taskqueue_core.limits import LIMITS
from taskqueue_core.recordstore.store import Record, RecordStore
from taskqueue_core.tasks import State

_READ = 20
"""number of events that are read at once"""
_PAGE_BYTES = LIMITS.frame
"""size of the events in a page at which the page ends"""
_CUT = 2 * LIMITS.batch
"""maximum number of events that an append cuts, more than it can add; later ones cut the rest"""
_encode = msgspec.msgpack.encode


class EventStreams:
    """The streams in a store. All methods are called within a step.

    ``notify`` wakes the readers of a record's events.
    """

    def __init__(self, store: RecordStore, notify: Callable[[Record], None]) -> None:
        self._store = store
        self._notify = notify

    def append(self, record: Record, item: NewEvents, now: float) -> None:
        """Append events of the current delivery of a record."""
        if not record.stream:
            record.stream = secrets.token_hex(16)
            self._store.save(record)
        stream = self._load(record)
        self._keep(record, stream, stream.take(item, now))

    def note(self, record: Record, kind: EventKind, value: str | float, now: float) -> None:
        """Append an event of the store to the stream of a record."""
        stream = self._load(record)
        self._keep(record, stream, [stream.note(kind, value, now)])

    def changed(self, record: Record, before: State | None, state: State, now: float) -> None:
        """Append the event of a change of state, and set until when the stream is kept. The caller saves the record."""
        if record.is_stream_over(now):
            self.leave(record)
            return
        stream = self._load(record)
        if event := stream.changed(before, state, now):
            self._keep(record, stream, [event])
        kept = self._store.settings(record.task.key).stream_ttl
        record.stream_until = None if state.live else now + kept

    def leave(self, record: Record) -> None:
        """Let a record have no stream any more. The caller saves or deletes the record."""
        self._store.save_link(f"left {record.stream}", b"")
        record.stream, record.stream_until = "", None

    def delete(self) -> bool:
        """Delete events that no task has any more. Return whether there are more of them."""
        left = self._store.links("left ", "left!", 2)
        for name, _ in left[:1]:
            stream = name.removeprefix("left ")
            found = self._store.links(*_events_of(stream), _READ)
            for event, _ in found:
                self._store.drop_link(event)
            if len(found) == _READ:
                return True
            self._store.drop_link(f"stream {stream}")
            self._store.drop_link(name)
        return len(left) > 1

    def page(self, record: Record, after: Position | None, limit: int) -> EventPage:
        """Return a page of the events of a record."""
        start = self._load(record).start(after)
        first, last = _events_of(record.stream)
        first = f"{_name(record.stream, start)} "
        events, size = list[Event](), 0
        while size < _PAGE_BYTES and len(events) < limit:
            found = self._store.links(first, last, min(_READ, limit - len(events)))
            if not found:
                break
            events += [msgspec.msgpack.decode(value, type=Event) for _, value in found]
            first = f"{found[-1][0]} "
            size += sum(len(value) for _, value in found)
        if events:
            return page_of(events, start)
        return EventPage(next=start.id if start.number else None, ended=record.ended)

    def _load(self, record: Record) -> EventStream:
        found = self._store.load_link(f"stream {record.stream}")
        return EventStream() if found is None else msgspec.msgpack.decode(found, type=EventStream)

    def _keep(self, record: Record, stream: EventStream, events: Iterable[Event]) -> None:
        """Store events that were added to a stream, cut older ones, and notify the readers."""
        settings, name = self._store.settings(record.task.key), record.stream
        for event in events:
            self._store.save_link(_name(name, Position.read(event.id)), _encode(event))
        for _ in range(_CUT):
            if stream.count == 1 or not stream.is_over(settings):
                break
            ((oldest, value),) = self._store.links(*_events_of(name), 1)
            stream.cut(msgspec.msgpack.decode(value, type=Event))
            self._store.drop_link(oldest)
        self._store.save_link(f"stream {name}", _encode(stream))
        self._notify(record)


def _events_of(stream: str) -> tuple[str, str]:
    """Return the limits between which the names of all events of a stream are."""
    return f"event {stream} ", f"event {stream}!"


def _name(stream: str, place: Position | None) -> str:
    attempt, number = place or (0, 0)
    return f"event {stream} {attempt:010} {number:020}"
