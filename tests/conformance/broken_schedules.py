# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about schedules."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from taskqueue_core.capabilities import Due, Fire, Fired, StoredSchedule
from taskqueue_core.tasks import Published
from tests.conformance.facade import FacadeSchedules


class _Firing(FacadeSchedules):
    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        return tuple([await self.fire_one(fire) for fire in fires])

    async def fire_one(self, fire: Fire) -> Fired:
        (done,) = await self.inner.fire(fire)
        fired: Fired = done
        return fired

    async def found(self, fire: Fire) -> StoredSchedule | None:
        stored: StoredSchedule | None = await self.inner.get(fire.name, key=fire.key)
        return stored


class FiresTwice(_Firing):
    """Defect: a step does not compare the time that it was planned for."""

    async def fire_one(self, fire: Fire) -> Fired:
        stored = await self.found(fire)
        if stored is not None and fire.planned_for is not None:
            fire = structs.replace(fire, planned_for=stored.next_at)
        return await super().fire_one(fire)


class FiresOldPlans(_Firing):
    """Defect: a step does not compare the version that it was planned for."""

    async def fire_one(self, fire: Fire) -> Fired:
        stored = await self.found(fire)
        return await super().fire_one(
            structs.replace(fire, version=stored.version if stored else fire.version)
        )


class MovesOnWhenRefused(_Firing):
    """Defect: an instant whose task was refused is over."""

    async def fire_one(self, fire: Fire) -> Fired:
        done = await super().fire_one(fire)
        if done.confirmations and done.confirmations[-1].status is Published.REFUSED:
            await self.inner.fire(structs.replace(fire, runs=()))
        return done


class ForgetsTheRefused(_Firing):
    """Defect: if a later task of a plan is refused, the schedule continues with the next time of the plan."""

    async def fire_one(self, fire: Fire) -> Fired:
        done = await super().fire_one(fire)
        stored = await self.found(fire)
        if len(done.confirmations) > 1 and stored is not None:
            late = structs.replace(fire, planned_for=stored.next_at, runs=())
            await self.inner.fire(late)
        return done


class ForgetsWhyRefused(_Firing):
    """Defect: the reason of a refusal is not kept."""

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        stored: StoredSchedule | None = await self.inner.get(name, key=key)
        return None if stored is None else structs.replace(stored, refused=None)


class HidesOthers(FacadeSchedules):
    """Defect: a schedule whose instant was refused is due again at once."""

    async def due(self, limit: int) -> Due:
        due: Due = await self.inner.due(limit)
        stored = await self.inner.list()
        late = [one for one in stored if one.next_at is not None and one.next_at <= due.now]
        late.sort(key=lambda one: one.next_at or 0.0)
        return structs.replace(due, schedules=tuple(late[:limit]))


class TurnsBack(FacadeSchedules):
    """Defect: a change sets the next time even if the caller asks to keep it."""

    async def put(self, schedule: StoredSchedule, **options: Any) -> StoredSchedule:
        options["keep_next"] = False
        stored: StoredSchedule = await self.inner.put(schedule, **options)
        return stored


class KeepsQuiet(FacadeSchedules):
    """Defect: a schedule that is put sets no signal."""

    def signal(self) -> Any:
        signal = self.inner.signal()
        signal.notify = lambda: None
        return signal


class ReplacesAnyVersion(FacadeSchedules):
    """Defect: a put replaces another version than the one that it names."""

    async def put(self, schedule: StoredSchedule, **options: Any) -> StoredSchedule:
        options["version"] = None
        stored: StoredSchedule = await self.inner.put(schedule, **options)
        return stored
