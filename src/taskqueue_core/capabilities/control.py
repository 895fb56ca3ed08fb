"""The capability ``control``: the methods that operators need."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from taskqueue_core.capabilities.settings import QueueSettings
from taskqueue_core.tasks import Delivery, Expired, Ledger, QueueStats, TaskStatus, WorkerInfo


class Maintained(msgspec.Struct, frozen=True, kw_only=True):
    """What one maintenance pass did and found."""

    promoted: int = 0
    expired: tuple[Expired, ...] = ()
    forgotten: int = 0
    """number of ended tasks whose records were deleted, because their results and deduplication windows had expired"""
    recovered: int = 0
    """number of deliveries that ended because their consumer crashed, or made no progress for `max_processing_time`"""
    removed: int = 0
    """number of idle queues that were removed; see the setting ``queue_ttl``"""
    unclaimed: tuple[str, ...] = ()
    """names of the queues that have waiting tasks but no subscription"""
    behind: float | None = None
    """seconds since the oldest work that is left became due; ``None`` if this pass left nothing"""
    again_in: float | None = None
    """seconds after which the next pass should start; ``None`` for the usual interval"""


class DeletedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """What the deletion of a queue did."""

    deleted: bool = False
    """whether the queue existed"""
    forgotten: int = 0
    """number of ended tasks whose records and results were deleted"""


class Control(Protocol):
    """The methods that operators need. A queue that was never used looks like an empty queue with default settings."""

    async def queues(self) -> tuple[str, ...]:
        """Return the names of all known queues, sorted."""

    async def settings(self, key: str) -> QueueSettings:
        """Return the current settings of a queue; the defaults if it has none."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Replace the settings of a queue, and return them with the next version number once they are in force.

        Raises `SettingsConflict` unless ``settings.version`` is the current version.
        """

    async def ledger(self, key: str) -> Ledger:
        """Return the ledger of a queue, read in one atomic step (law 1)."""

    async def stats(self, key: str) -> QueueStats:
        """Return the statistics of a queue."""

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        """Return the statuses of tasks; ``None`` for a task that is unknown or whose record has expired."""

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        """Return the results of tasks as JSON text; ``None`` for a task whose result is missing or has expired."""

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        """Record a running task's progress: a number from 0 to 1, or a short text. Return False for a stale receipt."""

    async def cancel(self, key: str, task_id: str) -> bool:
        """End a live task as ``cancelled``, and revoke its delivery. Return False if the task was not live."""

    async def reschedule(self, key: str, task_id: str, at: float) -> bool:
        """Let a waiting or scheduled task become available at the time ``at``, or at once if that has passed.

        A blocked task stays blocked, and does not become available before ``at``.

        Neither its attempt nor its deadline changes, and it counts against the capacity as before. Return False, and
        change nothing, if the task is running, has ended or is unknown, or if its present attempt was delivered before:
        a task that was released or redriven comes back at once (law 3).
        """

    async def purge(self, key: str) -> int:
        """End all blocked, waiting and scheduled tasks as ``cancelled``, and return their number.

        Running tasks continue. Scheduled tasks that become due during the call are ended, too; tasks that are published
        during it are not.
        """

    async def delete(self, key: str) -> DeletedQueue:
        """Delete a queue with its settings, its counters and the records and results of its ended tasks. Idempotent.

        Afterwards, an id that was published before counts as new. Raises `QueueInUse`, and deletes nothing, if the
        queue has waiting, scheduled, blocked or running tasks, dead letters, or subscriptions. A queue with many
        records is deleted in several steps. If it is used again between them, `QueueInUse` is raised as well, the queue
        and its settings stay, and the ids of the records that were deleted until then count as new.
        """

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return all workers that have an open subscription, whichever server they are connected to."""

    async def maintain(self) -> Maintained:
        """Run one maintenance pass of limited size. Idempotent; several servers may call it at once (law 10).

        A pass makes due tasks available, expires tasks past their deadline, ends the deliveries of crashed consumers,
        deletes old records, removes idle queues, repairs records that another program has changed, and reports queues
        that have waiting tasks but no subscription.

        A pass that leaves work sets `Maintained.behind`. Unless another process continues the work, it also sets
        `Maintained.again_in` to three times its own duration, so that maintenance takes at most a quarter of the
        store's time until it has caught up.
        """


@runtime_checkable
class LongPolling(Protocol):
    """A control that can delay its answer until a task has ended. It is optional, and not part of the contract."""

    async def wait_for_end(self, key: str, task_id: str, seconds: float) -> TaskStatus | None:
        """Return a task's status when it has ended or is a dead letter, after ``seconds`` at the latest.

        ``None`` means that the task is unknown. The longest wait is 30 seconds.
        """
