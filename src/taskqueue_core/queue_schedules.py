"""The schedules of a store, for applications and operators: `taskqueue_core.Queue.schedules`."""

from __future__ import annotations

import asyncio
import builtins
import math
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from typing import Protocol, runtime_checkable

from msgspec.structs import replace

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import (
    Fire,
    Run,
    Schedules,
    StoredSchedule,
    has,
    schedules_of,
)
from taskqueue_core.errors import (
    CapabilityMissing,
    InvalidInput,
    PublishUnconfirmed,
    SettingsConflict,
    UnknownKey,
)
from taskqueue_core.limits import check_name, check_number, check_time, kind_of
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import (
    CATCH_UP,
    Overlap,
    Schedule,
    Spec,
    check_overlap,
    next_instant,
    scheduled_task,
)
from taskqueue_core.tasks import Confirmation, Published

__all__ = ["QueueSchedules", "ServedSchedules"]

_TRIES = 10
_PAUSE = RetryPolicy(base=0.01, cap=0.05, jitter=1)
_BATCH_BYTES = 4 * 1024 * 1024
_BATCH = 100


@runtime_checkable
class ServedSchedules(Protocol):
    """Schedules of a server, which pauses them and publishes their tasks itself. Not part of the contract."""

    async def set_paused(self, name: str, *, paused: bool) -> StoredSchedule:
        """Pause or resume a schedule."""

    async def run_schedule(
        self, name: str, since: float | None, until: float | None, overlap: Overlap | None
    ) -> tuple[Confirmation, ...]:
        """Publish for the instants from ``since`` to before ``until``, or, without these, for now."""


class QueueSchedules:
    """The schedules of one backend. Servers and local workers publish their tasks.

    Each method raises `CapabilityMissing` if the backend keeps no schedules, and `BackendUnavailable`. The methods with
    a ``name``, except `get`, `put` and `delete`, raise `UnknownKey` if there is no such schedule.

    >>> status = await queue.schedules.put(Schedule("cats", Cron("@daily"), resize.call("cats.png")))
    >>> status = await queue.schedules.pause("cats")
    """

    def __init__(
        self,
        backend: Backend,
        time: Callable[[], Awaitable[float]],
        accepted: Callable[[Confirmation], Confirmation],
    ) -> None:
        """Use the schedules of ``backend``, whose time ``time`` returns. ``accepted`` raises the error of a refusal."""
        self._backend = backend
        self._time = time
        self._accepted = accepted

    @property
    def _store(self) -> Schedules:
        return schedules_of(self._backend)

    async def put(
        self, schedule: Schedule, *, version: int | None = None, declared_by: str | None = None
    ) -> ScheduleStatus:
        """Create a schedule, or replace the one with its name. Nothing is written if it is already stored like this.

        A pause or resume stays in force. The next instant stays the same unless the time of the schedule changes;
        then it is the first one after now. ``version`` is the one to replace; 0 means that there must be none.

        Raises `SettingsConflict` if ``version`` is given and the stored one is another, or if other programs keep
        changing the schedule, and `InvalidInput` if the stored schedule belongs to another queue.
        """
        if not isinstance(schedule, Schedule):
            raise InvalidInput("schedule", kind_of(schedule), "a Schedule")
        _check_version(version)
        if declared_by not in (None, ""):
            check_name("declared_by", declared_by)
        self.demand(schedule)
        attempt = 0
        while True:
            attempt += 1
            found = await self._store.get(schedule.name)
            try:
                return await self._put(schedule, found, version, declared_by)
            except SettingsConflict:
                if version is not None or attempt == _TRIES:
                    raise
            await asyncio.sleep(_PAUSE.delay(attempt))

    async def _put(
        self,
        schedule: Schedule,
        found: StoredSchedule | None,
        version: int | None,
        declared_by: str | None,
    ) -> ScheduleStatus:
        if found is not None and found.key != schedule.task.key:
            raise InvalidInput(
                "key",
                "another queue than that of the stored schedule",
                "the same queue; to move the schedule, delete it first",
            )
        before = None if found is None else _spec_or_none(found)
        spec = Spec(
            schedule=schedule,
            declared_by=declared_by,
            paused=None if before is None else before.paused,
        )
        text = spec.encode()
        if found is not None and before == spec and version in (None, found.version):
            return ScheduleStatus.of(found)
        next_at = None if spec.is_paused else next_instant(schedule, await self._time())
        stored = await self._store.put(
            StoredSchedule(key=schedule.task.key, name=schedule.name, spec=text, next_at=next_at),
            version=(0 if found is None else found.version) if version is None else version,
            keep_next=before is not None and _same_instants(before, spec),
        )
        return ScheduleStatus.of(stored)

    def demand(self, schedule: Schedule) -> None:
        """Raise `CapabilityMissing`, which names the field, if the backend cannot publish the tasks of a schedule."""
        store = self._store
        check_overlap(schedule.overlap, schedule.task)
        if isinstance(store, ServedSchedules):
            return  # the server knows what its backend can do
        needed = [] if schedule.overlap == "allow" else [(Capability.UNIQUE, "overlap")]
        if schedule.overlap == "wait":
            needed.append((Capability.ORDERING_KEYS, "overlap"))
        if schedule.task.ordering_key is not None:
            needed.append((Capability.ORDERING_KEYS, "ordering_key"))
        if schedule.task.unique is not None:
            needed.append((Capability.UNIQUE, "unique"))
        for capability, field in needed:
            if not has(self._backend, capability):
                raise CapabilityMissing(
                    f"{field}: the backend does not have the capability {capability.value!r}: use overlap='allow', "
                    "without an ordering key and a unique key, or another backend"
                )

    async def get(self, name: str) -> ScheduleStatus | None:
        """Return a schedule; ``None`` if there is none with this name."""
        check_name("name", name)
        found = await self._store.get(name)
        return None if found is None else ScheduleStatus.of(found)

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[ScheduleStatus, ...]:
        """Return up to ``limit`` schedules whose names come after ``after``, sorted by name.

        There may be fewer if they are large; the tuple is empty only at the end.
        """
        if after is not None:
            check_name("after", after)
        found = await self._store.list(after=after, limit=limit)
        return tuple(ScheduleStatus.of(stored) for stored in found)

    async def pause(self, name: str) -> ScheduleStatus:
        """Let a schedule fire no more, until `resume`. Its instants until then are not missed. Idempotent."""
        return await self._set_paused(name, paused=True)

    async def resume(self, name: str) -> ScheduleStatus:
        """Let a paused schedule fire again, from the first instant after now on. Idempotent."""
        return await self._set_paused(name, paused=False)

    async def _set_paused(self, name: str, *, paused: bool) -> ScheduleStatus:
        check_name("name", name)
        if isinstance(store := self._store, ServedSchedules):
            return ScheduleStatus.of(await store.set_paused(name, paused=paused))
        attempt = 0
        while True:
            attempt += 1
            found = await self._known(name)
            spec = Spec.decode(found.spec)
            if spec.paused is paused:
                return ScheduleStatus.of(found)
            next_at = None if paused else next_instant(spec.schedule, await self._time())
            changed = replace(found, spec=replace(spec, paused=paused).encode(), next_at=next_at)
            try:
                keep = spec.is_paused is paused
                stored = await self._store.put(changed, version=found.version, keep_next=keep)
                return ScheduleStatus.of(stored)
            except SettingsConflict:
                if attempt == _TRIES:
                    raise
            await asyncio.sleep(_PAUSE.delay(attempt))

    async def delete(self, name: str, *, version: int | None = None) -> bool:
        """Delete a schedule, and return whether there was one. Tasks that it has published stay.

        Raises `SettingsConflict` if ``version`` is given and the stored one is another.
        """
        check_name("name", name)
        _check_version(version)
        found = await self._store.get(name)
        return found is not None and await self._store.delete(found.key, name, version=version)

    async def next(self, name: str, count: int = 5) -> tuple[float, ...]:
        """Return up to ``count`` instants that come next, in Unix seconds; of a paused schedule, as if it were not."""
        check_number("count", count, 1, CATCH_UP)
        found = await self._known(name)
        schedule = Spec.decode(found.spec).schedule
        now = await self._time()
        instants: builtins.list[float] = []
        instant = next_instant(schedule, now) if found.next_at is None else found.next_at
        while instant is not None and len(instants) < count:
            instants.append(instant)
            instant = next_instant(schedule, instant)
        return tuple(instants)

    async def trigger(self, name: str, *, overlap: Overlap | None = None) -> Confirmation:
        """Publish the task of a schedule now, even if it is paused, and return the confirmation.

        `Schedule.overlap` decides what happens if an earlier task has not ended, unless ``overlap`` replaces it. Raises
        `QueueFull`, and `PublishUnconfirmed` if the response was lost.
        """
        (confirmation,) = await self.run(name, None, None, overlap)
        return self._accepted(confirmation)

    async def backfill(
        self,
        name: str,
        since: float | datetime,
        until: float | datetime,
        *,
        overlap: Overlap = "allow",
    ) -> tuple[Confirmation, ...]:
        """Publish the tasks of all instants from ``since`` to before ``until``, in order, and return the confirmations.

        The times have passed; they are Unix seconds, or datetimes with a time zone. The task of an instant that has
        been published before is a ``duplicate``, as long as its id is remembered. The first confirmation that is
        ``refused`` is the last one: repeat the call later. Raises `InvalidInput` for more than 1,000 instants.
        """
        return await self.run(name, _seconds("since", since), _seconds("until", until), overlap)

    async def run(
        self, name: str, since: float | None, until: float | None, overlap: Overlap | None
    ) -> tuple[Confirmation, ...]:
        """Do what `backfill` does, or without ``since`` and ``until`` what `trigger` does; return all confirmations."""
        check_name("name", name)
        if isinstance(store := self._store, ServedSchedules):
            return await store.run_schedule(name, since, until, overlap)
        found = await self._known(name)
        schedule = Spec.decode(found.spec).schedule
        if overlap is not None:
            schedule = replace(schedule, overlap=overlap)
        self.demand(schedule)
        now = await self._time()
        if since is None or until is None:
            instants = [math.floor(now * 1000) / 1000]
        else:
            instants = _between(schedule, since, until, now)
        confirmations: builtins.list[Confirmation] = []
        for fire in _fires(found, schedule, instants, now):
            answers = await self._fire(fire)
            confirmations += answers
            if answers[-1].status is Published.REFUSED:
                break
        return tuple(confirmations)

    async def _fire(self, fire: Fire) -> tuple[Confirmation, ...]:
        attempt = 0
        while True:
            attempt += 1
            try:
                (fired,) = await self._store.fire(fire)
            except PublishUnconfirmed:
                if attempt == _TRIES:
                    raise
            else:
                if not fired.stale:
                    return fired.confirmations
                found = await self._known(fire.name)
                if attempt == _TRIES or found.key != fire.key:
                    raise SettingsConflict(
                        "the schedule has changed since it was read: repeat the call"
                    )
                fire = replace(fire, version=found.version)
            await asyncio.sleep(_PAUSE.delay(attempt))

    async def _known(self, name: str) -> StoredSchedule:
        check_name("name", name)
        found = await self._store.get(name)
        if found is None:
            raise UnknownKey("name", "a schedule that does not exist", "the name of a schedule")
        return found


def _check_version(version: int | None) -> None:
    if version is not None:
        check_number("version", version, 0, 2**53)


def _spec_or_none(stored: StoredSchedule) -> Spec | None:
    try:
        return Spec.decode(stored.spec)
    except InvalidInput:
        return None


def _same_instants(before: Spec, after: Spec) -> bool:
    old, new = before.schedule, after.schedule
    times = (old.when, old.starts, old.ends) == (new.when, new.starts, new.ends)
    return times and before.is_paused is after.is_paused


def _between(schedule: Schedule, since: float, until: float, now: float) -> list[float]:
    """Return the instants of a backfill. Raises `InvalidInput`."""
    check_time("since", since)
    check_time("until", until)
    if until > now:
        raise InvalidInput("until", "a time in the future", "a time that has passed")
    if since >= until:
        raise InvalidInput("since", "a time that is not before until", "an earlier time")
    instants: list[float] = []
    instant = next_instant(schedule, math.nextafter(since, 0.0))
    while instant is not None and instant < until:
        if len(instants) == CATCH_UP:
            raise InvalidInput(
                "until",
                f"more than {CATCH_UP} instants",
                "an earlier time; call again for the rest",
            )
        if instant >= since:
            instants.append(instant)
        instant = next_instant(schedule, instant)
    return instants


def _fires(
    stored: StoredSchedule, schedule: Schedule, instants: list[float], now: float
) -> Iterator[Fire]:
    """Yield the steps that publish the tasks of instants, none of them too large."""
    size = max(1, min(_BATCH, _BATCH_BYTES // len(stored.spec)))
    for start in range(0, len(instants), size):
        runs = tuple(
            Run(instant, scheduled_task(schedule, instant, now))
            for instant in instants[start : start + size]
        )
        yield Fire(key=stored.key, name=stored.name, version=stored.version, runs=runs)


def _seconds(field: str, at: float | datetime) -> float:
    if not isinstance(at, datetime):
        check_time(field, at)
        return at
    if at.tzinfo is None:
        raise InvalidInput(field, "a datetime without a time zone", "one with a time zone")
    return at.timestamp()
