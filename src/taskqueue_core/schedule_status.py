"""A stored schedule, as applications and operators see it."""

from __future__ import annotations

import msgspec

from taskqueue_core.capabilities import Outcome, StoredSchedule
from taskqueue_core.errors import InvalidInput
from taskqueue_core.schedules import Schedule, Spec

__all__ = ["ScheduleStatus"]


class ScheduleStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule in the store, with its state.

    >>> status = await queue.schedules.put(Schedule("cats", Every(3600), resize.call("cats.png")))
    >>> status.version, status.paused
    (1, False)
    """

    name: str
    key: str
    """name of the queue"""
    schedule: Schedule | None
    """the schedule; ``None`` if it cannot be read: see ``problem``"""
    next_at: float | None
    """the next instant, in Unix seconds; ``None`` if there is none, because the schedule is paused or has ended"""
    paused: bool
    version: int
    """version number, increased by each change; `taskqueue_core.queue_schedules.QueueSchedules.put` can demand it"""
    declared_by: str | None = None
    """the prefix of the registry that declares it; ``None`` if it was put at run time"""
    recent: tuple[Outcome, ...] = ()
    """what became of the last instants, oldest first"""
    refused: Outcome | None = None
    """the last attempt to publish for ``next_at``, if the queue refused the task: it is tried again"""
    problem: str | None = None
    """why the schedule cannot be read and does not fire, for example because this machine lacks its time zone"""

    @classmethod
    def of(cls, stored: StoredSchedule) -> ScheduleStatus:
        """Return the status of a stored schedule."""
        spec, problem = None, None
        try:
            spec = Spec.decode(stored.spec)
        except InvalidInput as error:
            problem = str(error)
        return cls(
            name=stored.name,
            key=stored.key,
            schedule=None if spec is None else spec.schedule,
            next_at=stored.next_at,
            paused=spec is not None and spec.is_paused,
            version=stored.version,
            declared_by=None if spec is None else spec.declared_by,
            recent=stored.recent,
            refused=stored.refused,
            problem=problem,
        )
