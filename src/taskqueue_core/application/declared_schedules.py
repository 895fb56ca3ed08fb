"""Writing the schedules that registries declare into the store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import Schedule


class ScheduleChange(StrEnum):
    """What `taskqueue_core.Tasks.apply` does with a schedule.

    >>> applied = await tasks.apply(dry_run=True)
    >>> [each for each in applied.schedules if each.change is ScheduleChange.KEPT]
    []
    """

    CREATED = "created"
    CHANGED = "changed"
    DELETED = "deleted"
    """the registry declared it before, and does no more"""
    KEPT = "kept"
    """it was put at run time, or by another registry, so it stays as it is"""
    UNDECLARED = "undeclared"
    """the registry declared it before, and does no more; only ``prune`` deletes it"""


class AppliedSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that is not stored as it is declared.

    >>> applied = await tasks.apply(dry_run=True)
    >>> [(each.name, each.change) for each in applied.schedules]
    []
    """

    name: str
    key: str
    """name of the queue"""
    change: ScheduleChange


class DeclaredSchedules(msgspec.Struct, frozen=True, kw_only=True):
    """The schedules that a registry declares, with those of the registries that it includes."""

    owner: str
    """the prefix of the registry, by which the store knows what it declared"""
    prefixes: frozenset[str]
    """the prefixes of the registry and of those that it includes, with which the names begin"""
    queues: frozenset[str]
    """the queues of its tasks"""
    schedules: Mapping[str, Schedule]

    def owned(self, status: ScheduleStatus) -> bool:
        """Return whether this registry has declared a stored schedule.

        A registry without a prefix owns only schedules of its queues, because others without one may use the store.
        """
        return status.declared_by == self.owner and (bool(self.owner) or status.key in self.queues)


async def apply_schedules(
    queue: Queue, declared: Sequence[DeclaredSchedules], *, prune: bool, dry_run: bool
) -> tuple[AppliedSchedule, ...]:
    """Create and change the schedules that are declared, and delete with ``prune`` those that are declared no more.

    Raises `SettingsConflict` if another program changes a schedule at the same time, and `BackendUnavailable`.
    """
    if not has(queue.backend, Capability.SCHEDULES):
        return ()  # `demand_schedules` has made sure that there are none
    changes: list[AppliedSchedule] = []
    for registry in declared:
        for schedule in registry.schedules.values():
            change = await _apply(queue, registry, schedule, dry_run=dry_run)
            if change is not None:
                changes.append(_applied(schedule.name, schedule.task.key, change))
        async for status in _undeclared(queue, registry):
            change = ScheduleChange.DELETED if prune else ScheduleChange.UNDECLARED
            if prune and not dry_run:
                await queue.schedules.delete(status.name, version=status.version)
            changes.append(_applied(status.name, status.key, change))
    return tuple(changes)


def demand_schedules(queue: Queue, declared: Sequence[DeclaredSchedules]) -> None:
    """Raise `CapabilityMissing` if the backend lacks a capability that a declared schedule needs."""
    for registry in declared:
        for schedule in registry.schedules.values():
            queue.schedules.demand(schedule)


async def _apply(
    queue: Queue, registry: DeclaredSchedules, schedule: Schedule, *, dry_run: bool
) -> ScheduleChange | None:
    found = await queue.schedules.get(schedule.name)
    change = _change(registry, schedule, found)
    if dry_run or change not in (ScheduleChange.CREATED, ScheduleChange.CHANGED):
        return change
    version = 0 if found is None else found.version
    if found is not None and found.key != schedule.task.key:
        await queue.schedules.delete(schedule.name, version=version)
        version = 0
    await queue.schedules.put(schedule, version=version, declared_by=registry.owner)
    return change


def _change(
    registry: DeclaredSchedules, schedule: Schedule, found: ScheduleStatus | None
) -> ScheduleChange | None:
    if found is None:
        return ScheduleChange.CREATED
    if found.declared_by != registry.owner and found.problem is None:
        return ScheduleChange.KEPT
    same = found.schedule is not None and _is_same(found.schedule, schedule)
    return None if same else ScheduleChange.CHANGED


def _is_same(stored: Schedule, declared: Schedule) -> bool:
    """Return whether two schedules are equal. A codec encodes equal contents differently each time."""
    digest = declared.task.content_digest
    if digest is not None and digest == stored.task.content_digest:
        payload = stored.task.payload
        declared = replace(declared, call=replace(declared.task, payload=payload))
    return stored == declared


async def _undeclared(queue: Queue, registry: DeclaredSchedules) -> AsyncIterator[ScheduleStatus]:
    scanned: list[str] = []
    for prefix in sorted(registry.prefixes):
        if any(map(prefix.startswith, scanned)):
            continue
        scanned.append(prefix)
        async for status in _named(queue, prefix):
            if status.name not in registry.schedules and registry.owned(status):
                yield status


async def _named(queue: Queue, prefix: str) -> AsyncIterator[ScheduleStatus]:
    """Yield the stored schedules whose names begin with a prefix."""
    after: str | None = prefix or None
    while page := await queue.schedules.list(after=after, limit=LIMITS.batch):
        for status in page:
            if not status.name.startswith(prefix):
                return
            yield status
        after = page[-1].name


def _applied(name: str, key: str, change: ScheduleChange) -> AppliedSchedule:
    return AppliedSchedule(name=name, key=key, change=change)
