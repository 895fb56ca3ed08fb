"""The capability ``schedules``: the store keeps schedules, and publishes the task of each instant exactly once.

A *schedule* belongs to a queue, and has a time at which it fires next. To *fire* it means to publish the tasks of the
instants that have come, and to set the next time, both in one atomic step. The step names the time for which it was
planned: if another process was faster, the step changes nothing. So any number of processes may fire the schedules of a
store, without a leader.

The store reads no specification. Core computes the instants (`taskqueue_core.schedules`), and fires the schedules that
`Schedules.due` returns (`taskqueue_core.consumer.firing`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from taskqueue_core.capabilities.room import RoomSignal
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_json, check_label, check_name, check_time
from taskqueue_core.tasks import Confirmation, Task

RECENT = 20
"""number of outcomes that the store keeps of each schedule"""
RETRY_SECONDS = 1.0
"""seconds after which a schedule whose instant was not fired is due again"""
OVERLAP = "overlap"
"""result of an instant whose task was not stored, because another live task has its unique key"""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an instant of a schedule, or of several that were skipped for the same reason."""

    instant: float
    """the instant; the first one of several"""
    at: float
    """time at which the schedule was fired for it"""
    task_id: str | None = None
    """id of its task; ``None`` if the instant was skipped without an attempt to publish a task"""
    result: str
    """value of `Published` for its task, ``overlap``, ``not_unique``, or the reason of the `Skip`"""
    count: int = 1
    """number of instants"""


class StoredSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as the store keeps it. The constructor checks what the caller sets, and raises `InvalidInput`."""

    key: str
    """name of the queue to which its tasks are published"""
    name: str
    """name that is unique within the queue"""
    spec: bytes
    """the specification as JSON text, which the store does not read; the limit on its size is that of a payload"""
    next_at: float | None = None
    """time at which it fires next; ``None`` means that it does not fire, because it is paused or has ended"""
    version: int = 0
    """number that the store sets; every `Schedules.put` increases it, and it is never used for another schedule"""
    recent: tuple[Outcome, ...] = ()
    """the last `RECENT` outcomes, oldest first; the store keeps this record"""
    refused: Outcome | None = None
    """the last attempt for ``next_at``, if the queue refused the task; the result is the value of a `Refusal`

    The store keeps it until ``next_at`` changes. Its instant is ``next_at``, or a later one if the plan skips some.
    """

    def __post_init__(self) -> None:
        check_name("key", self.key)
        check_name("name", self.name)
        check_json("spec", self.spec, "payload")
        if self.next_at is not None:
            check_time("next_at", self.next_at)


class Run(msgspec.Struct, frozen=True):
    """An instant, and the task that is published for it."""

    instant: float
    task: Task


class Skip(msgspec.Struct, frozen=True):
    """Instants for which no tasks are published, and the reason, as a short printable text."""

    instant: float
    """the first of the instants"""
    reason: str
    count: int = 1
    """number of instants"""


class Fire(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one step for one schedule. Raises `InvalidInput` for a task of another queue."""

    key: str
    name: str
    version: int
    """the version of the schedule that the plan was made for"""
    planned_for: float | None = None
    """the `StoredSchedule.next_at` that the plan was made for; ``None`` to publish tasks, and leave it unchanged"""
    runs: tuple[Run, ...] = ()
    """the tasks to publish, oldest instant first"""
    skipped: tuple[Skip, ...] = ()
    """instants to record as skipped, all earlier than those of ``runs``"""
    next_at: float | None = None
    """the new time at which the schedule fires; without effect if ``planned_for`` is ``None``"""

    def __post_init__(self) -> None:
        if any(run.task.key != self.key for run in self.runs):
            raise InvalidInput("runs", "a task of another queue", f"tasks of the queue {self.key}")
        for at in (self.planned_for, self.next_at):
            if at is not None:
                check_time("next_at", at)
        for skip in self.skipped:
            check_label("skipped", skip.reason)


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did."""

    stale: bool = False
    """whether it changed nothing, because the schedule is not the one that the plan was made for"""
    confirmations: tuple[Confirmation, ...] = ()
    """one per task, up to the first that was refused, or to the last that the step published

    The instants of the tasks that were refused or left out have not been fired.
    """


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """The schedules that are due, by the store's clock."""

    now: float
    """the time on the store's clock at this answer; plans are made for it"""
    schedules: tuple[StoredSchedule, ...] = ()
    """the schedules whose time has come, the earliest first; they may lack their ``recent`` outcomes"""
    next_at: float | None = None
    """the time of the earliest schedule that is not in ``schedules``; it has passed if there are more that are due"""


class Schedules(Protocol):
    """The schedules of all queues. A schedule is stored together with its queue, and stays if the queue is deleted."""

    async def put(
        self, schedule: StoredSchedule, *, version: int | None = None, keep_next: bool = False
    ) -> StoredSchedule:
        """Store a schedule, and return it with its new version.

        If it is stored already, its ``recent`` outcomes are kept. The ``version`` in the schedule has no effect.

        ``version`` is the version that is replaced; 0 means that there must be none yet, ``None`` that any is replaced.
        Raises `SettingsConflict` if the current version is another one, unless the stored ``spec`` is already equal:
        then a call whose answer was lost is being repeated, and the stored schedule is returned unchanged.

        With ``keep_next``, a schedule that is already stored keeps the time at which it fires next. Use it if a change
        does not affect the instants, because the time may have advanced since it was read.
        """

    async def get(self, name: str, *, key: str | None = None) -> StoredSchedule | None:
        """Return the schedule with this name, of the queue ``key`` if it is given; ``None`` if there is none.

        The store does not refuse the same name in two queues; core does, by this method. If there are several, the one
        of the first queue is returned.
        """

    async def list(
        self, *, after: str | None = None, limit: int = 100
    ) -> tuple[StoredSchedule, ...]:
        """Return the first ``limit`` schedules with names after ``after``, sorted by name; fewer only at the end."""

    async def delete(self, key: str, name: str, *, version: int | None = None) -> bool:
        """Delete a schedule, and return whether there was one. Its published tasks stay.

        Raises `SettingsConflict` if ``version`` is given and the current version is another one.
        """

    async def due(self, limit: int) -> Due:
        """Return up to ``limit`` schedules that are due in each partition of the store; fewer if they are large.

        This changes nothing: a schedule is due until it is fired.
        """

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        """Fire schedules, each in one atomic step, and return what each step did, in the same order.

        Raises `PublishUnconfirmed` if the store's response was lost; calling again changes nothing that was done.

        If a schedule has another ``version``, or its ``next_at`` is not ``planned_for``, the step changes nothing, and
        is ``stale``. Otherwise it publishes the tasks as `Publisher.publish` does, in order, until one is refused, and
        sets ``next_at``: to the value of the plan, or to the instant of the task that was refused. If the first task is
        refused, only ``refused`` is changed. All instants that have been fired or skipped are added to ``recent``.
        If ``next_at`` is still ``planned_for``, the schedule is due again after `RETRY_SECONDS`. So schedules of full
        queues do not hide those that can be fired.

        A task whose unique key another one has is not refused: its instant is over.

        A step may publish only some of the tasks, if they are large: then the schedule continues with the instant of
        the next one. A call passes at most `Limits.call` tasks in total.
        """

    def signal(self) -> RoomSignal:
        """Return a signal that is set when a schedule may fire earlier than the last `due` said."""
