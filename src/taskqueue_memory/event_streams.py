"""The stream of events of one task."""

from __future__ import annotations

from collections import deque

import msgspec

from taskqueue_core.authoring.event_streams import EventStream
from taskqueue_core.capabilities import Event, QueueSettings


class MemoryEventStream(EventStream, kw_only=True):
    """A stream with its events."""

    events: deque[Event] = msgspec.field(default_factory=deque)
    """the events that are kept, the oldest first"""

    def keep(self, event: Event, settings: QueueSettings) -> None:
        """Store an event that was added, and cut the oldest ones beyond the limits."""
        self.events.append(event)
        while len(self.events) > 1 and self.is_over(settings):
            self.cut(self.events.popleft())
