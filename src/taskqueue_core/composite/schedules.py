"""The ``schedules`` of a composite backend: a schedule is stored in the part that accepts the tasks of its queue."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec import structs

from taskqueue_core.capabilities import (
    Due,
    Fire,
    Fired,
    RoomSignal,
    Run,
    Schedules,
    StoredSchedule,
    schedules_of,
)
from taskqueue_core.composite.backend import CompositeBackend, QueuePart, renamed
from taskqueue_core.composite.publisher import CombinedSignal, for_key
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import SettingsConflict
from taskqueue_core.tasks import Refusal


class JointSchedules(ABC):
    """Implementation of `Schedules` for a composite backend.

    If another part accepts the tasks of a queue, because its number of shards or its backend has changed, the schedules
    of the queue move there when they are due, or when they are changed. The part that they leave is closed to new
    tasks, so an instant is fired in one of the two parts only.
    """

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite
        self._of_member: list[Schedules] = [
            schedules_of(member.backend) for member in composite.members
        ]

    @abstractmethod
    async def _parts(self, key: str, name: str) -> Sequence[QueuePart]:
        """Return the parts that may have a schedule. The last one accepts the tasks of its queue."""

    @abstractmethod
    async def _close(self, part: QueuePart, key: str) -> None:
        """Make sure that a part accepts no tasks, before a schedule of the queue ``key`` leaves it."""

    @abstractmethod
    async def _refused(self, key: str) -> None:
        """Read again which part accepts the tasks of a queue, because a part that did has refused one."""

    async def put(
        self, schedule: StoredSchedule, *, version: int | None = None, keep_next: bool = False
    ) -> StoredSchedule:
        part = await self._settle(schedule.key, schedule.name)
        stored = await self._of_member[part.member].put(
            structs.replace(schedule, key=part.key), version=version, keep_next=keep_next
        )
        return structs.replace(stored, key=schedule.key)

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        if key is None:
            found = [self._public(*each) for each in await self._found(name)]
            known = [schedule for schedule in found if schedule is not None]
            return min(known, key=lambda schedule: schedule.key, default=None)
        for part in reversed(await self._parts(key, name)):
            schedule = await self._of_member[part.member].get(name, key=part.key)
            if schedule is not None:
                return structs.replace(schedule, key=key)
        return None

    async def _found(self, name: str) -> list[tuple[int, StoredSchedule]]:
        found = await gather_all(schedules.get(name) for schedules in self._of_member)
        return [(member, schedule) for member, schedule in enumerate(found) if schedule is not None]

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[StoredSchedule, ...]:
        pages = await gather_all(
            schedules.list(after=after, limit=limit) for schedules in self._of_member
        )
        by_place: dict[tuple[str, str], StoredSchedule] = {}
        for member, page in enumerate(pages):
            for schedule in page:
                public = self._public(member, schedule)
                if public is not None:
                    by_place[public.name, public.key] = public
        return tuple([by_place[place] for place in sorted(by_place)[:limit]])

    async def delete(self, key: str, name: str, *, version: int | None = None) -> bool:
        part = await self._settle(key, name)
        return await self._of_member[part.member].delete(part.key, name, version=version)

    async def due(self, limit: int) -> Due:
        composite = self._composite
        answers = await gather_all(
            composite.at_leisure(member, partial(schedules.due, limit), Due(now=math.inf))
            for member, schedules in zip(composite.members, self._of_member, strict=True)
        )
        due: list[StoredSchedule] = []
        times = [answer.next_at for answer in answers if answer.next_at is not None]
        for member, answer in enumerate(answers):
            for schedule in answer.schedules:
                public = self._public(member, schedule)
                if public is None:
                    continue
                target = (await self._parts(public.key, public.name))[-1]
                if target == (member, schedule.key):
                    due.append(public)
                else:
                    await self._move(
                        QueuePart(member, schedule.key), public.name, target, public.key
                    )
                    times.append(answer.now)
        due.sort(key=lambda schedule: schedule.next_at or 0.0)
        now = min(answer.now for answer in answers)
        return Due(now=now, schedules=tuple(due), next_at=min(times, default=None))

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        parts = [(await self._parts(fire.key, fire.name))[-1] for fire in fires]
        done: list[Fired] = [Fired(stale=True)] * len(fires)
        for member, schedules in enumerate(self._of_member):
            indexes = [index for index, part in enumerate(parts) if part.member == member]
            if indexes:
                inner = [_for_part(fires[index], parts[index].key) for index in indexes]
                for index, fired in zip(indexes, await schedules.fire(*inner), strict=True):
                    key = fires[index].key
                    answers = [for_key(answer, key) for answer in fired.confirmations]
                    done[index] = structs.replace(fired, confirmations=tuple(answers))
                    if any(answer.code is Refusal.MOVED for answer in answers):
                        await self._refused(key)
        return tuple(done)

    def signal(self) -> RoomSignal:
        return CombinedSignal([schedules.signal() for schedules in self._of_member])

    async def _settle(self, key: str, name: str) -> QueuePart:
        """Move a schedule to the part that accepts the tasks of its queue, and return this part."""
        *others, target = await self._parts(key, name)
        for part in others:
            schedule = await self._of_member[part.member].get(name, key=part.key)
            if schedule is not None:
                await self._move(part, name, target, key)
        return target

    async def _move(self, part: QueuePart, name: str, target: QueuePart, key: str) -> None:
        """Move a schedule to another part, unless it is there already.

        If this is interrupted, the schedule is in both parts, but fires only in the new one.
        """
        await self._close(part, key)
        source, to = self._of_member[part.member], self._of_member[target.member]
        # Read it after the part is closed: until then, another process may have fired it there.
        schedule = await source.get(name, key=part.key)
        if schedule is None:
            return
        copy = structs.replace(schedule, key=target.key)
        with suppress(SettingsConflict):  # changed since it was read: it will be moved again
            try:
                await to.put(copy, version=0)
            except SettingsConflict:
                # Another specification is stored there. It is older than this one, which a process has put that did not
                # know yet that the part is closed: a process that knows it moves the schedule before it changes it.
                older = await to.get(name, key=target.key)
                if await source.get(name, key=part.key) is None:
                    return  # another process has moved it, and it may have been changed since
                await to.put(copy, version=0 if older is None else older.version)
            await source.delete(part.key, name, version=schedule.version)

    def _public(self, member: int, schedule: StoredSchedule) -> StoredSchedule | None:
        key = self._composite.public_key(QueuePart(member, schedule.key))
        return None if key is None else structs.replace(schedule, key=key)


def _for_part(fire: Fire, key: str) -> Fire:
    runs = [Run(run.instant, renamed(run.task, key)) for run in fire.runs]
    return structs.replace(fire, key=key, runs=tuple(runs))
