"""``control``: the operator's side of a backend."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from taskqueue_core.errors import SettingsConflict
from taskqueue_core.flow import RateLimit
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Delivery, Expired, Ledger, QueueStats, TaskStatus, WorkerInfo

__all__ = ["Control", "Durability", "Maintained", "QueueSettings"]


class Durability(StrEnum):
    """What a confirmation of a publish or retry promises."""

    MEMORY = "memory"
    """it is in the store's memory"""
    PROCESS = "process"
    """it survives a crash of the store's process"""
    DISK = "disk"
    """it survives a power cut"""
    REPLICATED = "replicated"
    """it survives the loss of the store's machine"""


_FLOW = ("capacity", "max_inflight", "rate_limit", "paused", "intake_paused")


class QueueSettings(BaseModel):
    """How one queue behaves. Confirmed settings act on the next call (law 9). Durations are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(default=0, ge=0)
    """0 for the defaults; grows by 1 with each change"""
    retry: RetryPolicy = RetryPolicy()
    max_losses: int = Field(default=5, ge=0, le=1000)
    """the poison guard: an entry lost with its consumer more often than this is dead"""
    dedupe_window: float = Field(default=300.0, ge=0, le=30 * 86_400, allow_inf_nan=False)
    """how long after its end a task's id is remembered"""
    result_ttl: float = Field(default=3600.0, ge=0, le=365 * 86_400, allow_inf_nan=False)
    """how long a result is kept"""
    durability: Durability | None = None
    """what a confirmation promises; none: whatever the store does by itself. Refused where it can't be kept"""
    replicas: int = Field(default=1, ge=1, le=100)
    """how many replicas must have a task before it is confirmed, where the durability is ``replicated``"""
    journal: bool = False
    """write every transition into the backend's journal. Refused where there is none"""
    capacity: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """how many accepted tasks may be there that were never handed out; more are refused at the door (law 6)"""
    max_inflight: int = Field(default=0, ge=0, le=1_000_000_000)
    """how many may be in flight, over all consumers; 0 for any number (law 5)"""
    rate_limit: RateLimit | None = None
    """how many may be handed out in a time (law 5)"""
    paused: bool = False
    """nothing is handed out; publishing goes on"""
    intake_paused: bool = False
    """publishing is refused; what is there is handed out"""

    @property
    def flow(self) -> dict[str, object]:
        """Return what limits the flow and is not at its default: only a backend with ``flow`` keeps that."""
        told = self.model_dump()
        fields = type(self).model_fields
        return {name: told[name] for name in _FLOW if getattr(self, name) != fields[name].default}

    def followed_by(self, changed: QueueSettings) -> QueueSettings:
        """Return ``changed`` with the next version. Raises `SettingsConflict` unless it was made from these."""
        if changed.version != self.version:
            raise SettingsConflict(
                f"version {self.version} of the settings is in force, not {changed.version}: read them again"
            )
        return changed.model_copy(update={"version": self.version + 1})


class Maintained(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass of housekeeping did."""

    promoted: int = 0
    expired: tuple[Expired, ...] = ()
    forgotten: int = 0
    """ended tasks whose windows have passed"""
    recovered: int = 0
    """deliveries taken back from dead consumers"""


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
        """Return the queue at a glance."""
        ...

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        """Say what is known of tasks; ``None`` for unknown or forgotten ones."""
        ...

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        """Return results as JSON text; ``None`` where there is none (yet, or any more)."""
        ...

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        """Note the progress of a running task: 0..1 or a short text. False, and nothing changed, on a stale receipt."""
        ...

    async def cancel(self, key: str, task_id: str) -> bool:
        """End a live task as ``cancelled``, wherever it is; a running one is revoked. False if it was not live."""
        ...

    async def purge(self, key: str) -> int:
        """End all waiting and scheduled tasks as ``cancelled``; return how many. What runs is left alone."""
        ...

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers with an open subscription, on any replica."""
        ...

    async def maintain(self) -> Maintained:
        """Do one bounded pass of housekeeping. Idempotent, safe from every replica at once (law 10)."""
        ...
