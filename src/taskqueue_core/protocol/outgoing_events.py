"""The events of a worker's deliveries that the server has not confirmed."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.frames import EventFrame, WireEvent, WireEvents

MOST_EVENTS = 1000
"""maximum number of unstored events of one delivery, beyond which the oldest are left out"""
MOST_BYTES = 1024 * 1024
"""the same for the number of bytes; the newest event is always kept"""
MOST_IN_ALL = 16 * 1024 * 1024
"""the same for the number of bytes of all deliveries together, which lets each of them keep its newest event"""
_FRAME_BYTES = 512 * 1024
"""bytes of values after which a frame takes no more events"""
_PAUSE = 0.005
"""seconds after which events are sent although the server has not confirmed those before the last ones"""
_MOST_SENT = 1000
"""number of unconfirmed events from which on that is awaited without a limit"""


class _Stream:
    def __init__(self) -> None:
        self.first = 1
        self.events: deque[WireEvent] = deque()
        self.sizes: deque[int] = deque()
        self.size = 0
        self.sent = 0  # number of the events that were sent on this connection
        self.callbacks: list[Callable[[], None]] = []

    def pop(self) -> None:
        self.events.popleft()
        self.size -= self.sizes.popleft()
        self.first += 1
        self.sent = max(0, self.sent - 1)

    def call_back(self) -> None:
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            callback()


class OutgoingEvents:
    """Keeps events until the server confirms them, so that they can be sent again on another connection."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Create it. ``now`` returns the time in seconds."""
        self._now = now
        self._streams: dict[str, _Stream] = {}
        self._unsent: dict[str, None] = {}
        self._size = 0
        self._sent = 0
        """number of unconfirmed events that were sent on this connection"""
        self._newest = 0
        """number of the events that `frames` has returned last"""
        self._sent_at = 0.0
        """time at which it has returned them"""

    def __bool__(self) -> bool:
        return bool(self._streams)

    @property
    def unsent(self) -> bool:
        """Whether `frames` has something to send."""
        return bool(self._unsent)

    @property
    def pause(self) -> float:
        """Seconds until new events are to be sent: 0, or infinite if the server must confirm others first.

        The server reads the next events while the store takes the last ones. Later events travel together once those
        before the last ones are confirmed, or after a short time. So none of them waits for two others to be stored.
        """
        if self._sent <= self._newest:
            return 0.0
        if self._sent >= _MOST_SENT:
            return math.inf
        return max(0.0, self._sent_at + _PAUSE - self._now())

    def add(self, receipt: str, value: bytes, channel: str) -> None:
        """Add an event of a delivery. If too many are unconfirmed, the oldest of them are left out."""
        stream = self._streams.setdefault(receipt, _Stream())
        stream.events.append(WireEvent(value=msgspec.Raw(value), channel=channel))
        stream.sizes.append(len(value))
        stream.size += len(value)
        self._size += len(value)
        while len(stream.events) > 1 and (
            len(stream.events) > MOST_EVENTS or stream.size > MOST_BYTES or self._size > MOST_IN_ALL
        ):
            self._pop(stream)
        self._unsent[receipt] = None

    def after(self, receipt: str, callback: Callable[[], None]) -> None:
        """Call a function when the server has confirmed all events of a delivery, or they are dropped."""
        stream = self._streams.get(receipt)
        if stream is None or not stream.events:
            callback()
        else:
            stream.callbacks.append(callback)

    def frames(self) -> list[EventFrame]:
        """Return frames with all events that were not sent on this connection."""
        frames: list[EventFrame] = []
        streams: list[WireEvents] = []
        size = count = self._newest = 0
        for receipt in self._unsent:
            stream = self._streams[receipt]
            while stream.sent < len(stream.events):
                first, events = stream.first + stream.sent, list[WireEvent]()
                for index in range(stream.sent, len(stream.events)):
                    events.append(stream.events[index])
                    size, count = size + stream.sizes[index], count + 1
                    if size >= _FRAME_BYTES or count >= LIMITS.batch:
                        break
                stream.sent += len(events)
                self._newest += len(events)
                streams.append(WireEvents(receipt=receipt, first=first, events=events))
                if size >= _FRAME_BYTES or count >= LIMITS.batch:
                    frames.append(EventFrame(streams=streams))
                    streams, size, count = [], 0, 0
        self._sent += self._newest
        self._sent_at = self._now()
        self._unsent = {}
        if streams:
            frames.append(EventFrame(streams=streams))
        return frames

    def confirm(self, numbers: Mapping[str, int]) -> None:
        """Note that the server has stored the events of deliveries up to these numbers."""
        for receipt, number in numbers.items():
            stream = self._streams.get(receipt)
            if stream is None:
                continue
            while stream.events and stream.first <= number:
                self._pop(stream)
            if not stream.events:
                stream.call_back()

    def rewind(self) -> None:
        """Send all unconfirmed events again, because there is another connection."""
        self._sent = 0
        for receipt, stream in self._streams.items():
            stream.sent = 0
            if stream.events:
                self._unsent[receipt] = None

    def forget(self, *receipts: str) -> None:
        """Drop the events of deliveries that were settled or revoked."""
        for receipt in receipts:
            stream = self._streams.pop(receipt, None)
            if stream is not None:
                self._size -= stream.size
                self._sent -= stream.sent
                self._unsent.pop(receipt, None)
                stream.call_back()

    def _pop(self, stream: _Stream) -> None:
        self._size -= stream.sizes[0]
        self._sent -= stream.sent > 0
        stream.pop()

    def clear(self) -> None:
        """Drop all events."""
        self.forget(*self._streams)
