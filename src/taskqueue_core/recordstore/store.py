"""The interface that the author of a record store implements: transactions, and look-ups by index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

import msgspec

from taskqueue_core.authoring.batches import Tally
from taskqueue_core.authoring.entries import Entry
from taskqueue_core.capabilities import QueueSettings, StoredSchedule
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.rate_limit import Bucket
from taskqueue_core.tasks import Expired, State

AFTER_ALL = "~"
"""text that is sorted after every place"""
_IN_LANES = (State.WAITING, State.IN_FLIGHT)
_HIGHEST_PRIORITY = 9


def place_at(time: float) -> str:
    """Return the text with which places of a time begin, in lists by time."""
    return f"{time:022.9f}"


class Record(Entry, kw_only=True, eq=False):
    """The record of one task, with the fields that look-ups use. msgspec can encode and decode a whole record."""

    seq: int = 0
    """sequence number by which the records in the same state are ordered; unique in the whole store"""
    returned: int = 0
    """not 0 if the task was released since it became available; while it is in flight, the position of its delivery"""
    owner: int | None = None
    """number of the subscription that owns the delivery, if the task is in flight"""
    patience: float | None = None
    """seconds without reported progress after which a delivery counts as lost; ``None`` means no limit"""
    forget_at: float = 0.0
    """time from which the record of an ended task may be deleted, in Unix seconds"""
    linked: bool = False
    """whether other tasks wait for this one"""
    tally: Tally | None = None
    """what a blocked batch knows of its members"""
    ask_at: float = 0.0
    """time at which a blocked task asks again for the states of its parents, in Unix seconds"""
    needed_until: float = 0.0
    """time from which the record of an ended task is kept for lists alone, in Unix seconds"""
    indexed: tuple[str, ...] = ()
    """the tags by which the task can be found"""
    number: int = 0
    """place of the task in the lists of these tags"""
    stream: str = ""
    """name of the task's stream of events; empty if it has none"""
    stream_until: float | None = None
    """time until which the stream is kept, in Unix seconds; ``None`` while the task is live"""

    @property
    def place(self) -> str:
        """The place of the task in the list of those in its state, as ASCII text that is sorted as the list is."""
        place = f"{max(self.seq, self.returned):020}"
        if self.state in _IN_LANES:
            return f"{_HIGHEST_PRIORITY - self.task.priority} {place}"
        if self.state is State.BLOCKED:
            return place
        return f"{place_at(self.at if self.state is State.SCHEDULED else self.updated_at)} {place}"

    @property
    def due(self) -> float | None:
        """Time at which a scheduled task becomes due or a delivery without progress is lost; ``None`` means never."""
        if self.state is State.SCHEDULED:
            return self.at
        if self.state is not State.IN_FLIGHT or self.patience is None:
            return None
        # While a task is in flight, `updated_at` is the time of the delivery or of the last progress.
        end = self.updated_at + self.patience
        return None if self.task.deadline is not None and self.task.deadline <= end else end

    @property
    def unique_key(self) -> str | None:
        """The unique key that the task may hold; ``None`` if it holds none until the record is saved again."""
        unique = self.task.unique
        if unique is None or self.replaced is not None:
            return None
        return unique.key if self.live or self.updated_at < self.period_end else None

    @property
    def alarm(self) -> float | None:
        """The next time at which the task becomes due, is lost, expires, asks for its parents, or must be deleted.

        ``None`` means never.
        """
        if self.ended:
            return self.forget_at if self.stream_until is None else self.stream_until
        asks = self.ask_at if self.state is State.BLOCKED else None
        times = (self.due, asks, self.task.deadline if self.live else None, self.stream_until)
        return min((time for time in times if time is not None), default=None)

    def is_over(self, now: float) -> bool:
        """Return whether the task has ended and its record may be deleted."""
        return self.ended and self.forget_at <= now

    def is_stream_over(self, now: float) -> bool:
        """Return whether the stream of the task is no longer kept."""
        return self.stream_until is not None and self.stream_until <= now

    def overdue(self, now: float) -> bool:
        return self.task.deadline is not None and self.task.deadline <= now

    @property
    def expired(self) -> Expired:
        return Expired(self.task.key, self.task.id, self.attempt)


class ScheduleRecord(msgspec.Struct, frozen=True):
    """A schedule, with the field by which it is looked up. msgspec can encode and decode it."""

    schedule: StoredSchedule
    due: float | None
    """time at which it is due; later than its ``next_at`` if an instant was refused, ``None`` if it does not fire"""


class RecordStore(ABC):
    """A store of records, schedules, counters, settings and rate-limit buckets that only this process uses.

    All methods except `open`, `close` and `transaction` are called inside a transaction, and must see the changes of
    that transaction. Calls come from one thread and never overlap. The methods raise only exceptions of this package;
    they raise `BackendUnavailable` if the store fails or contains data that cannot be decoded.
    """

    @abstractmethod
    def open(self) -> None:
        """Open the store for exclusive use by this process, and create its tables or files if it is new.

        Raises `BackendUnavailable`, without waiting, if another process uses the store. Raises `ConfigurationError`,
        and changes nothing, if the store has another format or version. After an error, the backend calls `close`, and
        later `open` again.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the store, even if `open` failed halfway. After an error, the backend may call this or `open` again."""

    @abstractmethod
    def transaction(self, unsure: type[TaskQueueError]) -> AbstractContextManager[None]:
        """Store all changes that the body makes, or none if it raises an exception. What is stored survives a crash.

        Raises ``unsure`` if the commit failed and it is unknown whether the changes were stored. An exception that the
        body raises is passed on even if the rollback fails. After the body, no transaction may be left open.
        """

    @abstractmethod
    def last_position(self) -> int:
        """Return the highest ``seq`` of all records, or 0 if there are no records. Called once after `open`."""

    @abstractmethod
    def load(self, key: str, task_id: str) -> Record | None:
        """Return the record of a task, or ``None`` if the task has no record."""

    @abstractmethod
    def save(self, record: Record) -> None:
        """Write a record, which replaces an earlier record of the same task.

        The look-ups use the task's ``key`` and ``id``, and the record's ``state``, ``place``, ``seq``, ``due``,
        ``alarm``, ``owner`` and ``unique_key``.
        """

    @abstractmethod
    def drop(self, record: Record) -> None:
        """Delete a record."""

    @abstractmethod
    def listed(
        self, key: str, state: State, first: str, last: str, limit: int, *, newest: bool = False
    ) -> Sequence[Record]:
        """Return up to ``limit`` records of a key that are in a state, with places from ``first`` to before ``last``.

        The records are sorted by ``place`` (as bytes); with ``newest``, the highest first. Each receive calls this for
        one waiting record, so it must be fast.
        """

    @abstractmethod
    def in_state(self, key: str, state: State, limit: int, after: int = 0) -> Sequence[Record]:
        """Return up to ``limit`` records of a key that are in a state and have a ``seq`` above ``after``.

        The records are sorted by ``seq``.
        """

    @abstractmethod
    def sharing(self, key: str, unique_key: str, limit: int) -> Sequence[Record]:
        """Return up to ``limit`` records of a key that have this ``unique_key``, the highest ``seq`` first."""

    @abstractmethod
    def due(self, key: str, until: float, limit: int) -> Sequence[Record]:
        """Return up to ``limit`` records of a key whose ``due`` is at most ``until``, sorted by ``due`` and ``seq``.

        ``until`` may be infinity, which means all records that have a ``due``.
        """

    @abstractmethod
    def alarms(self, until: float, limit: int) -> Sequence[Record]:
        """Return up to ``limit`` records whose ``alarm`` is at most ``until``, sorted by ``alarm`` and ``seq``."""

    @abstractmethod
    def owned(self, owner: int | None = None) -> Sequence[Record]:
        """Return the records of this ``owner``, in any order; if ``owner`` is ``None``, the records of all owners."""

    @abstractmethod
    def load_schedule(self, name: str, key: str | None) -> ScheduleRecord | None:
        """Return the schedule of this name of the queue ``key``; if it is ``None``, of the first queue with one."""

    @abstractmethod
    def save_schedule(self, record: ScheduleRecord) -> None:
        """Write a schedule, which replaces an earlier one with its name and queue."""

    @abstractmethod
    def drop_schedule(self, record: ScheduleRecord) -> None:
        """Delete a schedule."""

    @abstractmethod
    def list_schedules(self, after: str, limit: int) -> Sequence[ScheduleRecord]:
        """Return the first ``limit`` schedules with names after ``after``, sorted by name and key."""

    @abstractmethod
    def due_schedules(self, until: float, limit: int) -> Sequence[ScheduleRecord]:
        """Return the first ``limit`` schedules whose ``due`` is at most ``until``, sorted by ``due``.

        ``until`` may be infinity, which means all schedules that have a ``due``.
        """

    @abstractmethod
    def load_link(self, name: str) -> bytes | None:
        """Return the value of a link, or ``None`` if there is none.

        Links tie tasks that wait for one another, lead from a tag to its tasks, and contain events and the audit log.
        """

    @abstractmethod
    def save_link(self, name: str, value: bytes) -> None:
        """Write a link, which replaces an earlier one with its name: up to 1,000 ASCII characters."""

    @abstractmethod
    def drop_link(self, name: str) -> None:
        """Delete a link, if there is one."""

    @abstractmethod
    def links(
        self, first: str, last: str, limit: int, *, newest: bool = False
    ) -> Sequence[tuple[str, bytes]]:
        """Return up to ``limit`` links with names from ``first`` to before ``last``.

        The links are sorted by name (as bytes); with ``newest``, the highest first.
        """

    @abstractmethod
    def count(self, key: str, name: str, by: int = 1) -> None:
        """Add ``by`` to the counter ``name`` of a queue."""

    @abstractmethod
    def counters(self, key: str) -> Counter[str]:
        """Return the counters of a queue. A counter that was never changed is 0."""

    @abstractmethod
    def settings(self, key: str) -> QueueSettings:
        """Return the settings of a queue; the defaults if no settings were stored.

        Almost every change calls this method, so it must be fast. Cache the decoded settings, and clear the cache when
        a transaction is rolled back.
        """

    @abstractmethod
    def configure(self, key: str, settings: QueueSettings) -> None:
        """Write the settings of a queue."""

    @abstractmethod
    def bucket(self, key: str) -> Bucket | None:
        """Return the rate-limit bucket of a queue that has a rate limit; ``None`` if no bucket is stored."""

    @abstractmethod
    def save_bucket(self, key: str, bucket: Bucket | None) -> None:
        """Store the rate-limit bucket of a queue, or delete it if ``bucket`` is ``None``."""

    @abstractmethod
    def queues(self) -> set[str]:
        """Return the names of all queues that have counters or settings."""

    @abstractmethod
    def remove(self, key: str) -> None:
        """Delete the counters, the settings and the rate-limit bucket of a queue that has no records."""
