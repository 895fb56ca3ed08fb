"""The data types of statistics: ledgers of queues, and the states of workers and backends."""

from __future__ import annotations

import msgspec

from taskqueue_core.task_state import State

__all__ = ["Health", "Ledger", "QueueStats", "WorkerInfo"]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The number of entries (accepted tasks) in each state: of one queue at one instant, or of several queues.

    >>> ledger = await queue.ledger("shop.resize")
    >>> ledger.published, ledger.done, ledger.balanced
    (1, 1, True)
    """

    published: int = 0
    blocked: int = 0
    """entries that wait for other tasks"""
    waiting: int = 0
    scheduled: int = 0
    in_flight: int = 0
    done: int = 0
    dead: int = 0
    expired: int = 0
    cancelled: int = 0
    discarded: int = 0

    @property
    def imbalance(self) -> int:
        """The number of published entries minus the sum of all states. Any value other than 0 violates law 1."""
        accounted: int = sum(getattr(self, state.value) for state in State)
        return self.published - accounted

    @property
    def balanced(self) -> bool:
        """Whether every published entry is in exactly one state."""
        return self.imbalance == 0

    def __add__(self, other: Ledger) -> Ledger:
        """Return the sum of two ledgers, state by state."""
        return Ledger(**{f: getattr(self, f) + getattr(other, f) for f in self.__struct_fields__})


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one queue."""

    key: str
    ledger: Ledger
    oldest_waiting: float | None = None
    """time at which the longest-waiting task became available, in Unix seconds"""
    delivered: int = 0
    redelivered: int = 0
    """number of deliveries that were released or lost"""
    retried: int = 0
    lost: int = 0
    subscribers: int = 0
    blocked_on_dead: int = 0
    """number of blocked tasks that dead letters hold, see `TaskStatus.held_by`"""


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, identified by its id, with all of its connections."""

    worker_id: str
    connections: int
    keys: tuple[str, ...]
    in_flight: int
    since: float
    """time at which the oldest of its open connections was opened, in Unix seconds"""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a backend is available, with details that depend on the backend."""

    ok: bool
    backend: str
    details: dict[str, str | int | float | bool | None] = {}
