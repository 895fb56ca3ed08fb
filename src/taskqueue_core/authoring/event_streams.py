"""The events of one task: what an append adds, what is cut, and what a reader gets. Nothing is stored here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import msgspec

from taskqueue_core.capabilities import (
    Event,
    EventKind,
    EventPage,
    NewEvents,
    Position,
    QueueSettings,
    RoomSignal,
)
from taskqueue_core.task_state import State


class EventStream(msgspec.Struct, kw_only=True):
    """What a backend keeps of a stream besides its events. The methods return the events that are to be added."""

    last: int = 0
    """number of the last event"""
    attempt: int = 0
    count: int = 0
    """number of the events that are kept"""
    size: int = 0
    """number of bytes of the events that are kept"""
    run: str = ""
    """receipt of the delivery that appended last"""
    taken: int = 0
    """number of the events of this delivery that were stored or left out"""

    def take(self, item: NewEvents, now: float) -> list[Event]:
        """Add the events of a delivery that were not added before."""
        added: list[Event] = []
        if self.run != item.delivery.receipt:
            self.run, self.taken, self.attempt = item.delivery.receipt, 0, item.delivery.attempt
            added.append(self.note(EventKind.ATTEMPT, item.delivery.attempt, now))
        left_out = item.first - 1 - self.taken
        if left_out > 0:
            self.last, self.taken = self.last + left_out, self.taken + left_out
        new = item.events[max(0, -left_out) :]
        added += [self._add(EventKind.DATA, each.channel, each.value, now) for each in new]
        self.taken += len(new)
        return added

    def note(self, kind: EventKind, value: str | float, now: float) -> Event:
        """Add an event of the store."""
        return self._add(kind, None, msgspec.json.encode(value), now)

    def changed(self, before: State | None, state: State, now: float) -> Event | None:
        """Add an event for a change of the task's state, if it is one that a reader learns."""
        if not state.live and state is not State.DEAD:
            return self.note(EventKind.END, state, now)
        if state is State.DEAD or before is State.DEAD:
            return self.note(EventKind.STATE, state, now)
        return None

    def _add(self, kind: EventKind, channel: str | None, value: bytes, now: float) -> Event:
        self.last += 1
        place = Position(self.attempt, self.last)
        event = Event(id=place.id, kind=kind, channel=channel, value=value, at=now)
        self.count, self.size = self.count + 1, self.size + size_of(event)
        return event

    def is_over(self, settings: QueueSettings) -> bool:
        """Return whether the oldest event is to be cut, unless it is the newest one; then `cut` it, and ask again."""
        return self.count > settings.stream_events or self.size > settings.stream_bytes

    def cut(self, oldest: Event) -> None:
        """Note that the oldest event is not kept any more."""
        self.count, self.size = self.count - 1, self.size - size_of(oldest)

    def start(self, after: Position | None) -> Position:
        """Return the position after which a reader continues."""
        if after is None or after > (self.attempt, self.last):
            return Position(0, 0)
        return after


def size_of(event: Event) -> int:
    """Return the number of bytes for which an event counts."""
    return len(event.value) + len(event.channel or "")


def page_of(events: Iterable[Event], after: Position) -> EventPage:
    """Return a page of events that follow ``after``, with events of the kind ``trimmed`` where numbers are missing."""
    found: list[Event] = []
    last = after
    for event in events:
        place = Position.read(event.id) or last
        missing = place.number - last.number - 1
        if missing > 0:
            gap = Position(place.attempt, place.number - 1)
            value = str(missing).encode()
            found.append(Event(id=gap.id, kind=EventKind.TRIMMED, value=value, at=event.at))
        found.append(event)
        last = place
    ended = bool(found) and found[-1].kind is EventKind.END
    return EventPage(events=tuple(found), next=last.id if last.number else None, ended=ended)


async def wait_for_events(
    read: Callable[[], Awaitable[EventPage | None]],
    signal: RoomSignal,
    wait: float,
    now: Callable[[], float] = time.monotonic,
) -> EventPage | None:
    """Return the first page of ``read`` that has events or is the last one; the last page after ``wait`` seconds.

    ``signal`` must fire when an event was added, and its time must be that of ``now``.
    """
    if not wait:
        return await read()
    end = now() + wait
    async with signal:
        page = await read()
        while not _is_news(page) and (left := end - now()) > 0:
            await signal.wait(left)
            page = await read()
    return page


def _is_news(page: EventPage | None) -> bool:
    return page is None or bool(page.events) or page.ended


def events_after(events: deque[Event], after: Position, limit: int) -> list[Event]:
    """Return up to ``limit`` events that follow a position, from events in their order."""
    start = len(events)
    while start and (Position.read(events[start - 1].id) or after) > after:
        start -= 1
    return list(islice(events, start, start + limit))
