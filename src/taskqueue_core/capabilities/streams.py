"""The capability ``streams``: events of running tasks, which other processes read while the tasks run.

A task has a *stream* of events from its first appended event on. The queue's settings ``stream_events`` and
``stream_bytes`` limit it: the oldest events are cut first, and the newest one is always kept. A stream is readable as
long as its task is live, and for ``stream_ttl`` seconds after the task has ended or become a dead letter. A publish
that uses the id again begins without a stream.

Each event has the id ``ATTEMPT-NUMBER``. The number increases by one with each event of the stream, also from one
attempt to the next, so a reader knows how many events it has missed. Besides the events that the worker appends, a
stream gets:

- ``attempt`` with the number of the attempt, before the first event of each delivery: what follows does not continue
  the events of an earlier delivery;
- ``progress`` with the value of each reported progress;
- ``state`` with the state, when the task becomes a dead letter or a dead letter is live again;
- ``end`` with the state, when the task ends. It is the last event.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Protocol

import msgspec

from taskqueue_core.errors import InvalidInput, TooLarge
from taskqueue_core.limits import LIMITS, check_channel, check_json, check_number, kind_of
from taskqueue_core.tasks import Delivery

LONGEST_WAIT = 30.0
"""maximum number of seconds for which `Streams.events` waits"""
_MOST = 10**14
"""maximum number of an event"""
_EXPECTED = "the id of an event, such as 1-57"
_CURSOR = re.compile(r"([0-9]{1,5})-([0-9]{1,15})")


class EventKind(StrEnum):
    """What an event is about."""

    STATE = "state"
    """the task became a dead letter, or a dead letter is live again"""
    PROGRESS = "progress"
    """the progress that the task has reported"""
    DATA = "data"
    """a value that the task has streamed"""
    ATTEMPT = "attempt"
    """a delivery began to append events"""
    TRIMMED = "trimmed"
    """events before the next one were cut; the value is their number"""
    END = "end"
    """the task has ended"""


class NewEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A value that a running task streams. Raises `InvalidInput` if it is not JSON, too large, or has a bad channel."""

    value: bytes
    """the value as JSON text, at most `Limits.event` bytes"""
    channel: str = "data"
    """name by which readers choose events"""

    def __post_init__(self) -> None:
        check_json("value", self.value, "event")
        check_channel("channel", self.channel)

    @property
    def size(self) -> int:
        """The number of bytes of the value and the channel."""
        return len(self.value) + len(self.channel)


class NewEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Events of one delivery, in their order: at most `Limits.batch`, and `Limits.frame` bytes.

    Raises `InvalidInput` if there are more.
    """

    delivery: Delivery
    events: tuple[NewEvent, ...]
    first: int
    """number of the first of the events among all events of the delivery, which are numbered from 1

    An event whose number was stored before is not stored again, so a call may be repeated. Numbers that are left out
    count as events that were cut.
    """

    def __post_init__(self) -> None:
        check_number("first", self.first, 1, _MOST)
        if len(self.events) > LIMITS.batch:
            raise InvalidInput("events", kind_of(self.events), f"at most {LIMITS.batch} events")
        if self.size > LIMITS.frame:
            raise TooLarge("events", f"{self.size} bytes", f"at most {LIMITS.frame} bytes")

    @property
    def size(self) -> int:
        """The number of bytes of the values and the channels."""
        return sum(each.size for each in self.events)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a task, as it is stored."""

    id: str
    """number of the attempt, "-", and the number of the event in the stream"""
    kind: EventKind
    channel: str | None = None
    """channel of an event of the kind ``data``; ``None`` for other kinds"""
    value: bytes
    """the value as JSON text"""
    at: float
    """time at which the event was stored, in Unix seconds"""


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """Events of a task, in their order."""

    events: tuple[Event, ...] = ()
    next: str | None = None
    """id of the last event that was read so far, for the argument ``after`` of the next call"""
    ended: bool = False
    """whether the task has ended, and there are no events after this page"""


class Position(NamedTuple):
    """The place of an event in the order of all events of a task."""

    attempt: int
    number: int

    @property
    def id(self) -> str:
        """The id of the event."""
        return f"{self.attempt}-{self.number}"

    @classmethod
    def read(cls, after: object) -> Position | None:
        """Return the position of an event id. Raises `InvalidInput` for the field ``after``."""
        if after is None:
            return None
        if not isinstance(after, str):
            raise InvalidInput("after", kind_of(after), _EXPECTED)
        return _position(after)


@lru_cache(1024)  # an id is read several times on its way to the readers
def _position(event_id: str) -> Position:
    parts = _CURSOR.fullmatch(event_id)
    if parts is None:
        raise InvalidInput("after", kind_of(event_id), _EXPECTED)
    return Position(int(parts[1]), int(parts[2]))


class Streams(Protocol):
    """What workers and readers of events need."""

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        """Append events to the streams of running tasks, and return whether each receipt is current, in order.

        Events with a stale receipt are dropped. The events of one item are stored in one atomic step, and a call may
        pass the same delivery several times. Appending is no progress: it does not extend the time in which a task must
        report some.
        """

    async def events(
        self,
        key: str,
        task_id: str,
        *,
        after: str | None = None,
        limit: int = 100,
        wait: float = 0,
    ) -> EventPage | None:
        """Return the events of a task after the id ``after``, at most ``limit`` and perhaps fewer; see `checked_page`.

        ``None`` means that the task is unknown. A task without a stream has no events; `EventPage.ended` says whether
        it has ended. If there are no events, the call waits up to ``wait`` seconds for some, at most `LONGEST_WAIT`.
        Where events were cut or left out, an event of the kind ``trimmed`` has their number. An ``after`` that is
        higher than the id of the last event belongs to a stream that is gone: the first events are returned.
        """


def checked_page(after: object, limit: object, wait: object) -> Position | None:
    """Check the arguments of `Streams.events`, and return the position. Raises `InvalidInput` with the field's name."""
    check_number("limit", limit, 1, 1000)
    if not isinstance(wait, int | float) or not 0 <= wait <= LONGEST_WAIT:
        raise InvalidInput("wait", kind_of(wait), f"seconds from 0 to {LONGEST_WAIT:.0f}")
    return Position.read(after)
