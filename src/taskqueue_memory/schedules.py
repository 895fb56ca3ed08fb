"""The schedules of the memory backend. Each operation runs without an ``await`` and is therefore atomic."""

from __future__ import annotations

import itertools
from heapq import nsmallest

from taskqueue_core.authoring.schedule_steps import (
    check_fires,
    check_schedule_limit,
    check_version,
    fire_step,
    put_step,
)
from taskqueue_core.capabilities import Due, Fire, Fired, StoredSchedule
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.room_signal import MemoryRoomSignal, RoomNotifier
from taskqueue_memory.transitions import MemoryStore

_SIGNAL = ""
"""name under which the signals are open; no queue has it"""


class MemorySchedules:
    """Schedules of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._by_name: dict[tuple[str, str], StoredSchedule] = {}
        """schedules by name and queue"""
        self._due = DueHeap(self._is_current)
        self._signals = RoomNotifier(store.clock)
        self._versions = itertools.count(1)

    async def put(
        self, schedule: StoredSchedule, *, version: int | None = None, keep_next: bool = False
    ) -> StoredSchedule:
        stored = self._by_name.get((schedule.name, schedule.key))
        changed = put_step(
            stored,
            schedule,
            version=version,
            keep_next=keep_next,
            new_version=next(self._versions),
        )
        if changed is not stored:
            first = self._due.next_at()
            self._keep(changed)
            if changed.next_at is not None and (first is None or changed.next_at < first):
                self._signals.notify(_SIGNAL)
        return changed

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        if key is not None:
            return self._by_name.get((name, key))
        found = [schedule for schedule in self._by_name.values() if schedule.name == name]
        return min(found, key=lambda schedule: schedule.key, default=None)

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[StoredSchedule, ...]:
        check_schedule_limit(limit)
        names = (place for place in self._by_name if after is None or place[0] > after)
        return tuple([self._by_name[place] for place in nsmallest(limit, names)])

    async def delete(self, key: str, name: str, *, version: int | None = None) -> bool:
        stored = self._by_name.get((name, key))
        check_version(stored, version)
        return self._by_name.pop((name, key), None) is not None

    async def due(self, limit: int) -> Due:
        check_schedule_limit(limit)
        due = tuple(self._due.take(self._store.clock.now(), limit))
        next_at = self._due.next_at()
        for schedule in due:
            self._note_due(schedule)
        return Due(schedules=due, next_at=next_at)

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        check_fires(fires)
        self._store.forget(2 * sum(len(fire.runs) for fire in fires))
        return tuple([self._fire(fire) for fire in fires])

    def _fire(self, fire: Fire) -> Fired:
        stored = self._by_name.get((fire.name, fire.key))
        done, changed = fire_step(stored, fire, self._store.publish, self._store.clock.now())
        if changed is not None:
            self._keep(changed)
        return done

    def signal(self) -> MemoryRoomSignal:
        return MemoryRoomSignal(self._signals, (_SIGNAL,))

    def _keep(self, schedule: StoredSchedule) -> None:
        self._by_name[schedule.name, schedule.key] = schedule
        self._note_due(schedule)

    def _note_due(self, schedule: StoredSchedule) -> None:
        if schedule.next_at is not None:
            self._due.add(schedule.next_at, schedule, 0)

    def _is_current(self, schedule: StoredSchedule, _mark: int) -> bool:
        return self._by_name.get((schedule.name, schedule.key)) is schedule
