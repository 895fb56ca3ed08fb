"""What an author writes: a transaction, and look-ups that an index or a sorted key answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

from taskqueue_core.authoring.entries import Entry
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.rate_limit import Bucket
from taskqueue_core.tasks import Expired, State

__all__ = [
    "Record",
    "RecordStore",
]


class Record(Entry, kw_only=True, eq=False):
    """The books of one task, with what it is found by. msgspec encodes and decodes it whole."""

    seq: int = 0
    """its place in its lane, or among those of its state; a number given once"""
    at: float = 0.0
    """when it falls due, if it is scheduled"""
    owner: int | None = None
    """the number of the subscription that has it in flight"""
    patience: float | None = None
    """how many seconds it may be in flight without progress"""
    forget_at: float = 0.0
    """when it may be dropped, if it has ended"""

    @property
    def due(self) -> float | None:
        """When it is to wait: it is scheduled for then, or counts as lost from then on. ``None``: never."""
        if self.state is State.SCHEDULED:
            return self.at
        if self.state is not State.IN_FLIGHT or self.patience is None:
            return None
        end = self.updated_at + self.patience  # of the delivery, or of the last progress
        return None if self.task.deadline is not None and self.task.deadline <= end else end

    @property
    def alarm(self) -> float | None:
        """When time alone will change it: it is due, expires or may be dropped. ``None``: never."""
        if self.ended:
            return self.forget_at
        times = (self.due, self.task.deadline if self.live else None)
        return min((time for time in times if time is not None), default=None)

    def overdue(self, now: float) -> bool:
        """Whether its deadline has come."""
        return self.task.deadline is not None and self.task.deadline <= now

    @property
    def expired(self) -> Expired:
        """The report that it expired."""
        return Expired(self.task.key, self.task.id, self.attempt)


class RecordStore(ABC):
    """Records, counters, settings and buckets in one place that this process has for itself.

    All but `open`, `close` and `transaction` are called inside a transaction, and see what it wrote. None is called
    from two threads, or while another one runs. Only errors of the package leave them: where the store fails,
    or holds what cannot be decoded, `BackendUnavailable`.
    """

    @abstractmethod
    def open(self) -> None:
        """Take the store for this process alone, and make what it needs if it is new.

        Raises `BackendUnavailable`, at once, where another process has it, and `ConfigurationError` where it is of
        another kind or version, and leaves it as it is. After an error core calls `close`, and `open` again later.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the store, a half opened one too. It may be opened again; if it raised, closed again."""

    @abstractmethod
    def transaction(self, unsure: type[TaskQueueError]) -> AbstractContextManager[None]:
        """Do the whole body or, if anything is raised in it, nothing. What is done survives a crash.

        Raises ``unsure`` if the end failed and it is unknown which of the two happened. What the body raised is passed
        on even if the rollback fails, and the next transaction finds none left open.
        """

    @abstractmethod
    def last_position(self) -> int:
        """Return the highest ``seq`` of all records, 0 without any. Asked once, after `open`."""

    @abstractmethod
    def load(self, key: str, task_id: str) -> Record | None:
        """Return the record of a task."""

    @abstractmethod
    def save(self, record: Record) -> None:
        """Write a record, in place of the former one of its task.

        The look-ups find it by its task's ``key``, ``id`` and ``priority``, and by its ``state``, ``seq``, ``due``,
        ``alarm`` and ``owner``.
        """

    @abstractmethod
    def drop(self, record: Record) -> None:
        """Forget a record."""

    @abstractmethod
    def first_waiting(self, key: str) -> Record | None:
        """Return the waiting record of a key with the highest priority, among those the one with the lowest ``seq``."""

    @abstractmethod
    def in_state(self, key: str, state: State, limit: int, after: int = 0) -> Sequence[Record]:
        """Return records of a key in a state with a ``seq`` above ``after``, by ``seq``."""

    @abstractmethod
    def due(self, key: str, until: float, limit: int) -> Sequence[Record]:
        """Return records of a key with a ``due`` up to a time (it may be infinite), by ``due`` and ``seq``."""

    @abstractmethod
    def alarms(self, until: float, limit: int) -> Sequence[Record]:
        """Return records of any key with an ``alarm`` up to a time, by ``alarm`` and ``seq``."""

    @abstractmethod
    def owned(self, owner: int | None = None) -> Sequence[Record]:
        """Return the records with this ``owner``, or with any, in any order."""

    @abstractmethod
    def count(self, key: str, name: str, by: int = 1) -> None:
        """Add to a counter of a queue."""

    @abstractmethod
    def counters(self, key: str) -> Counter[str]:
        """Return the counters of a queue."""

    @abstractmethod
    def settings(self, key: str) -> QueueSettings:
        """Return the settings of a queue, the defaults unless they were configured.

        Asked at nearly every move, so it must be cheap: cache the decoded settings, until a transaction is undone.
        """

    @abstractmethod
    def configure(self, key: str, settings: QueueSettings) -> None:
        """Write the settings of a queue."""

    @abstractmethod
    def bucket(self, key: str) -> Bucket | None:
        """Return the tokens of a queue; ``None`` if there are none, or no longer. Called if deliveries have a rate."""

    @abstractmethod
    def save_bucket(self, key: str, bucket: Bucket | None) -> None:
        """Write the tokens of a queue in place of the former ones, or drop them."""

    @abstractmethod
    def queues(self) -> set[str]:
        """Return the keys that have counters or settings."""
