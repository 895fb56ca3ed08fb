"""The events of running tasks in the memory backend."""

from __future__ import annotations

from taskqueue_core.authoring.event_streams import events_after, page_of, wait_for_events
from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.capabilities import EventPage, NewEvents, Position, checked_page
from taskqueue_memory.event_streams import MemoryEventStream
from taskqueue_memory.room_signal import MemoryRoomSignal
from taskqueue_memory.transitions import MemoryStore


class MemoryStreams:
    """The capability ``streams`` of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        check_size("items", items)
        return tuple([self._append(item) for item in items])

    def _append(self, item: NewEvents) -> bool:
        record = self._store.receipts.get(item.delivery.receipt)
        if record is None:
            return False
        record.stream = stream = record.stream or MemoryEventStream()
        for event in stream.take(item, self._store.clock.now()):
            self._store.keep_event(record, stream, event)
        return True

    async def events(
        self,
        key: str,
        task_id: str,
        *,
        after: str | None = None,
        limit: int = 100,
        wait: float = 0,
    ) -> EventPage | None:
        place = checked_page(after, limit, wait)

        async def read() -> EventPage | None:
            return self._read(key, task_id, place, limit)

        signal = MemoryRoomSignal(self._store.streaming, (f"{key}/{task_id}",))
        return await wait_for_events(read, signal, wait, self._store.clock.now)

    def _read(self, key: str, task_id: str, after: Position | None, limit: int) -> EventPage | None:
        record = self._store.find(key, task_id)
        if record is None or record.replaced is not None:
            return None
        stream, now = record.stream, self._store.clock.now()
        if stream is None or (not record.live and record.stream_until <= now):
            return EventPage(next=None if after is None else after.id, ended=record.ended)
        start = stream.start(after)
        found = events_after(stream.events, start, limit)
        if found:
            return page_of(found, start)
        return EventPage(next=start.id if start.number else None, ended=record.ended)
