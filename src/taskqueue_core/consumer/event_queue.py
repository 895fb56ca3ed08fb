"""A queue of events of running tasks, which appends them to the store in batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from taskqueue_core.capabilities import NewEvent, NewEvents, Streams
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.outgoing_events import MOST_BYTES, MOST_EVENTS, MOST_IN_ALL
from taskqueue_core.tasks import Delivery

PAUSE = 0.01
"""seconds between two rounds, so that events travel together"""
_ROUND_BYTES = 1024 * 1024
"""number of bytes after which a round takes no more events"""
_ROUND_DELIVERIES = 50
"""maximum number of deliveries in a round: their readers are served while the store takes the next round"""


class EventBuffer:
    """Consecutive events of one delivery that wait to be stored."""

    def __init__(self, first: int) -> None:
        """Create an empty buffer. ``first`` is the number of the next event, counted from 1 in each delivery."""
        self.first = first
        """number of the oldest event"""
        self._events: deque[NewEvent] = deque()
        self.size = 0
        """number of bytes of the events with their channels, as in `NewEvents`"""

    def __len__(self) -> int:
        return len(self._events)

    @property
    def next(self) -> int:
        """The number of the event that is added next."""
        return self.first + len(self._events)

    def add(self, event: NewEvent) -> None:
        """Add the newest event."""
        self._events.append(event)
        self.size += event.size

    def cut(self, excess: int) -> None:
        """Leave out the oldest events beyond `MOST_EVENTS` and `MOST_BYTES`, and those of ``excess`` bytes."""
        most = min(MOST_BYTES, self.size - excess)
        while len(self._events) > 1 and (len(self._events) > MOST_EVENTS or self.size > most):
            self._pop()

    def take(self, size: int) -> tuple[NewEvent, ...]:
        """Remove and return the oldest events: at least one, and others up to ``size`` bytes, within `NewEvents`."""
        taken = [self._pop()]
        size -= taken[0].size
        while self._events and len(taken) < LIMITS.batch:
            size -= self._events[0].size
            if size < 0:
                break
            taken.append(self._pop())
        return tuple(taken)

    def _pop(self) -> NewEvent:
        event = self._events.popleft()
        self.size -= event.size
        self.first += 1
        return event


class EventQueue:
    """Collects events of running deliveries, and appends them to the store in rounds, those of a delivery in order.

    The first events are appended at once. Events that are put during a round, and during ``pause`` seconds after it,
    are appended together in the next one. After each round, ``on_stored`` gets the number of the last stored event of
    each delivery, and ``on_stale`` the receipts that are not current any more.
    """

    def __init__(
        self,
        streams: Streams,
        outage: OutageRetry,
        *,
        on_stored: Callable[[dict[str, int]], Awaitable[None]] | None = None,
        on_stale: Callable[[Sequence[str]], Awaitable[None]],
        pause: float = PAUSE,
    ) -> None:
        self._streams = streams
        self._outage = outage
        self._on_stored = on_stored
        self._on_stale = on_stale
        self._pause = pause
        self._waiting: dict[str, tuple[Delivery, deque[EventBuffer]]] = {}
        self._count = 0
        self._bytes = 0
        self._next: dict[str, int] = {}
        self._sending: set[str] = set()
        self._callbacks: dict[str, list[Callable[[], None]]] = {}
        self._has_work = asyncio.Event()
        self._urgent = asyncio.Event()
        self._stored = asyncio.Event()

    @property
    def awaited(self) -> int:
        """The number of deliveries for whose events something waits."""
        return len(self._callbacks)

    def put(self, delivery: Delivery, *events: NewEvent) -> None:
        """Queue the next events of a delivery. Of those that wait, the oldest ones beyond the limits are left out."""
        number = self._next.get(delivery.receipt, 1)
        self._next[delivery.receipt] = number + len(events)
        buffer = self._add(delivery, events, number)
        before, size = len(buffer), buffer.size
        buffer.cut(self._bytes - MOST_IN_ALL)
        self._count -= before - len(buffer)
        self._bytes -= size - buffer.size

    def put_numbered(self, delivery: Delivery, events: Sequence[NewEvent], first: int) -> None:
        """Queue events that the worker has numbered, the first of them ``first``. The caller awaits `room`."""
        self._add(delivery, events, first)

    def _add(self, delivery: Delivery, events: Sequence[NewEvent], first: int) -> EventBuffer:
        _, buffers = self._waiting.setdefault(delivery.receipt, (delivery, deque()))
        if not buffers or buffers[-1].next != first:
            buffers.append(EventBuffer(first))
        buffer, size = buffers[-1], buffers[-1].size
        for event in events:
            buffer.add(event)
        self._count += len(events)
        self._bytes += buffer.size - size
        self._has_work.set()
        return buffer

    async def room(self) -> None:
        """Wait until few events wait for the store."""
        while self._count > MOST_EVENTS or self._bytes > MOST_BYTES:
            self._stored.clear()
            await self._stored.wait()

    def after(self, receipt: str, callback: Callable[[], None]) -> None:
        """Call a function when all events of a delivery are stored, or its receipt is not current any more."""
        if receipt not in self._waiting and receipt not in self._sending:
            callback()
            return
        self._callbacks.setdefault(receipt, []).append(callback)
        self._urgent.set()

    def end(self, receipt: str, callback: Callable[[], None]) -> None:
        """Do the same for a delivery that has ended, to which no more events are added."""
        self._next.pop(receipt, None)
        self.after(receipt, callback)

    async def finish(self, seconds: float | None = None) -> None:
        """Wait until all events are stored, for at most ``seconds``; ``None`` means no limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._waiting or self._sending:
                    self._urgent.set()
                    self._stored.clear()
                    await self._stored.wait()

    def forget(self, receipt: str) -> None:
        """Drop what waits of a delivery that has ended or belongs to another worker."""
        _, buffers = self._waiting.pop(receipt, (None, ()))
        self._count -= sum(map(len, buffers))
        self._bytes -= sum(buffer.size for buffer in buffers)
        self._next.pop(receipt, None)
        if receipt not in self._sending:
            self._call_back(receipt)

    def clear(self) -> None:
        """Drop all events."""
        sending, self._sending = self._sending, set()
        for receipt in {*self._waiting, *sending}:
            self.forget(receipt)
        self._stored.set()

    async def run(self) -> None:
        """Append queued events until cancelled. Raises the exceptions of the store, except those of an outage."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._waiting:
                await self._append_some()
            if not self._pause:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause):
                    await self._urgent.wait()

    async def _append_some(self) -> None:
        items: list[NewEvents] = []
        size = 0
        while self._waiting and size < _ROUND_BYTES and len(items) < _ROUND_DELIVERIES:
            receipt = next(iter(self._waiting))
            delivery, buffers = self._waiting[receipt]
            buffer = buffers[0]
            first, before = buffer.first, buffer.size
            events = buffer.take(_ROUND_BYTES)
            self._count -= len(events)
            self._bytes -= before - buffer.size
            size += before - buffer.size
            if not buffer:
                buffers.popleft()
            if not buffers:
                del self._waiting[receipt]
            items.append(NewEvents(delivery=delivery, events=events, first=first))
        self._urgent.clear()
        self._sending = {item.delivery.receipt for item in items}
        answers = await self._outage.retry_until_available(partial(self._streams.append, *items))
        sent, self._sending = self._sending, set()
        stored: dict[str, int] = {}
        stale: list[str] = []
        for item, current in zip(items, answers, strict=True):
            receipt = item.delivery.receipt
            if current:
                stored[receipt] = item.first + len(item.events) - 1
            else:
                stale.append(receipt)
                self.forget(receipt)
        for receipt in sent:
            if receipt not in self._waiting:
                self._call_back(receipt)
        self._stored.set()
        if stored and self._on_stored is not None:
            await self._on_stored(stored)
        if stale:
            await self._on_stale(stale)

    def _call_back(self, receipt: str) -> None:
        for callback in self._callbacks.pop(receipt, ()):
            callback()
