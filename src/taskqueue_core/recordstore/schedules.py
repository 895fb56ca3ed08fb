"""The capability ``schedules`` of a backend on a `RecordStore`."""

from __future__ import annotations

import math
from collections.abc import Callable

from taskqueue_core.authoring.schedule_steps import (
    check_fires,
    check_schedule_limit,
    check_version,
    due_again,
    fire_step,
    put_step,
)
from taskqueue_core.authoring.unsupported import reject_ordering_keys
from taskqueue_core.capabilities import Due, Fire, Fired, StoredSchedule
from taskqueue_core.errors import PublishUnconfirmed
from taskqueue_core.recordstore.notify import RecordRoomSignal
from taskqueue_core.recordstore.store import ScheduleRecord
from taskqueue_core.recordstore.transitions import ALL_SCHEDULES, Transitions
from taskqueue_core.tasks import Confirmation, Task


class RecordSchedules:
    """The schedules of a `RecordBackend`."""

    def __init__(
        self, transitions: Transitions, publish: Callable[[Task, float], Confirmation]
    ) -> None:
        self._transitions = transitions
        self._store = transitions.store
        self._publish = publish
        self._last_version = 0

    async def put(
        self, schedule: StoredSchedule, *, version: int | None = None, keep_next: bool = False
    ) -> StoredSchedule:
        with self._transitions.step() as now:
            before = self._store.load_schedule(schedule.name, schedule.key)
            stored = None if before is None else before.schedule
            changed = put_step(
                stored,
                schedule,
                version=version,
                keep_next=keep_next,
                new_version=self._new_version(now, stored),
            )
            if changed is not stored:
                first = self._store.due_schedules(math.inf, 1)
                self._store.save_schedule(ScheduleRecord(changed, changed.next_at))
                if changed.next_at is not None and not (
                    first and (first[0].due or 0.0) <= changed.next_at
                ):
                    self._transitions.notify_schedules()
        return changed

    def _new_version(self, now: float, stored: StoredSchedule | None) -> int:
        """Return a number that no schedule has had: microseconds, because deleted schedules leave nothing behind."""
        last = max(self._last_version, 0 if stored is None else stored.version)
        self._last_version = max(last + 1, round(now * 1_000_000))
        return self._last_version

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        with self._transitions.step():
            found = self._store.load_schedule(name, key)
        return None if found is None else found.schedule

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[StoredSchedule, ...]:
        check_schedule_limit(limit)
        with self._transitions.step():
            found = self._store.list_schedules(after or "", limit)
        return tuple([record.schedule for record in found])

    async def delete(self, key: str, name: str, *, version: int | None = None) -> bool:
        with self._transitions.step():
            found = self._store.load_schedule(name, key)
            check_version(None if found is None else found.schedule, version)
            if found is not None:
                self._store.drop_schedule(found)
        return found is not None

    async def due(self, limit: int) -> Due:
        check_schedule_limit(limit)
        with self._transitions.step() as now:
            found = self._store.due_schedules(math.inf, limit + 1)
        due = [record for record in found[:limit] if (record.due or 0.0) <= now]
        rest = found[len(due) :]
        return Due(
            now=now,
            schedules=tuple([record.schedule for record in due]),
            next_at=rest[0].due if rest else None,
        )

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        check_fires(fires)
        reject_ordering_keys([run.task for fire in fires for run in fire.runs])
        return await self._transitions.when_promoted(
            {fire.key for fire in fires},
            lambda now: tuple([self._fire(fire, now) for fire in fires]),
            PublishUnconfirmed,
        )

    def _fire(self, fire: Fire, now: float) -> Fired:
        found = self._store.load_schedule(fire.name, fire.key)
        stored = None if found is None else found.schedule
        done, changed = fire_step(stored, fire, lambda task: self._publish(task, now), now)
        if changed is not None:
            self._store.save_schedule(ScheduleRecord(changed, due_again(fire, changed, now)))
        return done

    def signal(self) -> RecordRoomSignal:
        return RecordRoomSignal(self._transitions.signals, (ALL_SCHEDULES,))
