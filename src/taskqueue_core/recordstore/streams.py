"""The capability ``streams`` of a backend on a `RecordStore`."""

from __future__ import annotations

import asyncio
from collections import deque

from taskqueue_core.authoring.event_streams import wait_for_events
from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.capabilities import EventPage, NewEvents, checked_page
from taskqueue_core.recordstore.notify import RecordRoomSignal
from taskqueue_core.recordstore.transitions import STEP, Transitions


class RecordStreams:
    """The events of running tasks of a `RecordBackend`."""

    def __init__(self, transitions: Transitions) -> None:
        self._transitions = transitions

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        check_size("items", items)
        left, answers = deque(items), list[bool]()
        while left:
            events = 0
            # One step appends several items, because each step is written to disk.
            with self._transitions.step() as now:
                while left and events < STEP:
                    item = left.popleft()
                    events += 1 + len(item.events)
                    answers.append(self._append(item, now))
            await asyncio.sleep(0)
        return tuple(answers)

    def _append(self, item: NewEvents, now: float) -> bool:
        task = item.delivery.task
        record = self._transitions.find(task.key, task.id, now)
        if record is None or record.receipt != item.delivery.receipt:
            return False
        self._transitions.streams.append(record, item, now)
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
            with self._transitions.step() as now:
                record = self._transitions.find(key, task_id, now)
                if record is None or record.replaced is not None:
                    return None
                if not record.stream or record.is_stream_over(now):
                    return EventPage(next=None if place is None else place.id, ended=record.ended)
                return self._transitions.streams.page(record, place, limit)

        signal, clock = self._signal(f"{key}/{task_id}"), self._transitions.clock
        if not wait:
            return await read()
        timer = clock.call_at(clock.now() + wait, signal.notify)
        try:
            return await wait_for_events(read, signal, wait, clock.now)
        finally:
            timer.cancel()

    def _signal(self, name: str) -> RecordRoomSignal:
        return RecordRoomSignal(self._transitions.signals, (name,))
