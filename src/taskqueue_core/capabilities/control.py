"""``control``: the operator's side of a backend."""

from __future__ import annotations

from typing import Protocol

import msgspec

from taskqueue_core.capabilities.settings import QueueSettings
from taskqueue_core.tasks import Delivery, Expired, Ledger, QueueStats, TaskStatus, WorkerInfo

__all__ = ["Control", "Maintained"]


class Maintained(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one pass of maintenance."""

    promoted: int = 0
    expired: tuple[Expired, ...] = ()
    forgotten: int = 0
    """ended tasks whose windows have passed"""
    recovered: int = 0
    """deliveries taken back from dead consumers, or because they had no progress for `max_processing_time`"""
    unclaimed: tuple[str, ...] = ()
    """queues with waiting tasks and no subscription"""


class Control(Protocol):
    """Queues exist from their first task, settings or subscription on; an unknown one reads as empty."""

    async def queues(self) -> tuple[str, ...]:
        """Return the names of all known queues, sorted."""
        ...

    async def settings(self, key: str) -> QueueSettings:
        """Return the settings in force."""
        ...

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Replace the settings. ``settings.version`` must be the one in force, else `SettingsConflict`.

        Returns them with the next version once every partition has them.
        """
        ...

    async def ledger(self, key: str) -> Ledger:
        """Return the queue's ledger, read in one step (law 1)."""
        ...

    async def stats(self, key: str) -> QueueStats:
        """Return the statistics of a queue."""
        ...

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        """Return the status of tasks; ``None`` for an unknown task, or one whose record has expired."""
        ...

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        """Return results as JSON text; ``None`` if there is none, or not yet, or it has expired."""
        ...

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        """Record the progress of a running task: 0..1 or a short text. Return False for a stale receipt."""
        ...

    async def cancel(self, key: str, task_id: str) -> bool:
        """End a live task as ``cancelled``; a running one is revoked. Return False if the task was not live."""
        ...

    async def purge(self, key: str) -> int:
        """End all waiting and scheduled tasks as ``cancelled``, and return their number. Running tasks continue."""
        ...

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers with an open subscription, on any replica."""
        ...

    async def maintain(self) -> Maintained:
        """Do one bounded pass of maintenance. Idempotent; all replicas may call it at the same time (law 10).

        It makes due tasks available, expires overdue ones, takes back lost deliveries, deletes old records, repairs
        records that another program has changed, and reports queues with waiting tasks and no subscription.
        """
        ...
