"""The schedules of the memory backend. Each operation runs without an ``await`` and is therefore atomic."""

from __future__ import annotations

import itertools
from heapq import nsmallest

from taskqueue_core.authoring.schedule_steps import (
    check_fires,
    check_schedule_limit,
    check_version,
    due_again,
    fire_step,
    put_step,
)
from taskqueue_core.capabilities import Due, Fire, Fired, StoredSchedule
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.room_signal import MemoryRoomSignal, RoomNotifier
from taskqueue_memory.transitions import MemoryStore

_SIGNAL = ""
"""name under which the signals are open; no queue has it"""


class _Entry:
    """A schedule, and the time at which it is due: its ``next_at``, or later if an instant was refused."""

    def __init__(self) -> None:
        self.schedule: StoredSchedule
        self.due_at: float | None = None
        self.turn = 0
        """number of the last change of ``due_at``"""


class MemorySchedules:
    """Schedules of the memory backend."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._entries: dict[tuple[str, str], _Entry] = {}
        """by name and queue"""
        self._due: DueHeap[_Entry] = DueHeap(lambda entry, turn: entry.turn == turn)
        self._signals = RoomNotifier(store.clock)
        self._versions = itertools.count(1)

    async def put(
        self, schedule: StoredSchedule, *, version: int | None = None, keep_next: bool = False
    ) -> StoredSchedule:
        stored = self._find(schedule.key, schedule.name)
        changed = put_step(
            stored,
            schedule,
            version=version,
            keep_next=keep_next,
            new_version=next(self._versions),
        )
        if changed is not stored:
            first = self._due.next_at()
            self._keep(changed, changed.next_at)
            if changed.next_at is not None and (first is None or changed.next_at < first):
                self._signals.notify(_SIGNAL)
        return changed

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        if key is not None:
            return self._find(key, name)
        found = [entry.schedule for place, entry in self._entries.items() if place[0] == name]
        return min(found, key=lambda schedule: schedule.key, default=None)

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[StoredSchedule, ...]:
        check_schedule_limit(limit)
        places = (place for place in self._entries if after is None or place[0] > after)
        return tuple([self._entries[place].schedule for place in nsmallest(limit, places)])

    async def delete(self, key: str, name: str, *, version: int | None = None) -> bool:
        check_version(self._find(key, name), version)
        entry = self._entries.pop((name, key), None)
        if entry is not None:
            entry.turn += 1
        return entry is not None

    async def due(self, limit: int) -> Due:
        check_schedule_limit(limit)
        now = self._store.clock.now()
        due = list(self._due.take(now, limit))
        next_at = self._due.next_at()
        for entry in due:
            self._note_due(entry, entry.due_at)
        return Due(now=now, schedules=tuple([entry.schedule for entry in due]), next_at=next_at)

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        check_fires(fires)
        self._store.forget(2 * sum(len(fire.runs) for fire in fires))
        return tuple([self._fire(fire) for fire in fires])

    def _fire(self, fire: Fire) -> Fired:
        stored, now = self._find(fire.key, fire.name), self._store.clock.now()
        done, changed = fire_step(stored, fire, self._store.publish, now)
        if changed is not None:
            self._keep(changed, due_again(fire, changed, now))
        return done

    def signal(self) -> MemoryRoomSignal:
        return MemoryRoomSignal(self._signals, (_SIGNAL,))

    def _find(self, key: str, name: str) -> StoredSchedule | None:
        entry = self._entries.get((name, key))
        return None if entry is None else entry.schedule

    def _keep(self, schedule: StoredSchedule, due_at: float | None) -> None:
        entry = self._entries.setdefault((schedule.name, schedule.key), _Entry())
        entry.schedule = schedule
        self._note_due(entry, due_at)

    def _note_due(self, entry: _Entry, due_at: float | None) -> None:
        entry.turn += 1
        entry.due_at = due_at
        if due_at is not None:
            self._due.add(due_at, entry, entry.turn)
