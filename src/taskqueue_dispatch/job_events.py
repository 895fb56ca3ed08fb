"""What a server streams while it runs a job: it is appended to the job's events, before the job is settled."""

from __future__ import annotations

import asyncio

from taskqueue_core.capabilities import NewEvent
from taskqueue_core.consumer.event_queue import EventQueue
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery
from taskqueue_dispatch.endpoint_client.streamed import StreamedValue


class JobEvents:
    """The events of one delivery of a job."""

    def __init__(self, events: EventQueue | None, delivery: Delivery) -> None:
        """Create it without events. ``events`` is ``None`` if the backend keeps none; then they are dropped."""
        self._events = events
        self._delivery = delivery
        self._next = 1

    async def put(self, streamed: StreamedValue) -> None:
        """Append a value. While many values of all jobs wait for the store, wait, so that the server waits as well.

        A value of more than `Limits.event` bytes is left out; readers learn that one is missing.
        """
        number, self._next = self._next, self._next + 1
        if self._events is None or len(streamed.value) > LIMITS.event:
            return
        await self._events.room()
        event = NewEvent(value=streamed.value, channel=streamed.channel)
        self._events.put_numbered(self._delivery, [event], number)

    async def stored(self) -> None:
        """Wait until the store has all values, or does not take them any more."""
        if self._events is not None and self._next > 1:
            done = asyncio.Event()
            self._events.end(self._delivery.receipt, done.set)
            await done.wait()
