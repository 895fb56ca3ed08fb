"""What the store keeps: a record per task, lanes of waiting entries, a queue per key. Data and its order, no policy."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from hashlib import blake2b
from typing import Protocol

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import (
    DeadLetter,
    Failure,
    Ledger,
    QueueStats,
    Settled,
    State,
    Task,
    TaskStatus,
)
from taskqueue_memory.agenda import ROOM, Agenda

__all__ = ["Consumer", "Lane", "QueueState", "Record", "is_scheduled"]

_HISTORY = 20
_SMALL = 512  # bytes of a payload that are not worth a digest


class Consumer(Protocol):
    """An open subscription, as far as the store knows it."""

    consumer: str
    keys: tuple[str, ...]
    since: float
    owned: dict[str, Record]
    """what it has in flight, by receipt"""
    ready: dict[QueueState, None]
    """queues that may have work, the next one to be served first"""

    def new_receipt(self) -> str:
        """Return a receipt that nobody can guess."""
        ...

    def wake(self) -> bool:
        """Wake a waiting receive; say whether there was one."""
        ...

    def revoke(self, receipt: str) -> None:
        """Note that a delivery is no longer owned."""
        ...

    async def close(self) -> None:
        """Hand back everything that is owned."""
        ...


class Record:
    """One task, and its one live or last entry."""

    __slots__ = (
        "attempt",
        "available_at",
        "delivered_at",
        "digest",
        "handed_out",
        "history",
        "last",
        "losses",
        "owner",
        "prior",
        "progress",
        "queue",
        "reason",
        "receipt",
        "result",
        "result_until",
        "seq",
        "state",
        "task",
        "tokens",
        "updated_at",
    )

    def __init__(self, queue: QueueState, task: Task, now: float) -> None:
        self.queue = queue
        self.task = task
        self.digest: bytes | None = None
        """what is kept of a long payload after the end"""
        self.state = State.WAITING
        self.seq = 0
        """its place in its lane; an item of a lane or heap with another one is out of date"""
        self.attempt = 1
        self.handed_out = 0
        """the last attempt that was delivered"""
        self.prior = 0
        self.losses = 0
        self.available_at = now
        self.updated_at = now
        self.delivered_at = now
        self.receipt: str | None = None
        self.owner: Consumer | None = None
        self.last: tuple[str, str, Settled] | None = None
        """the last settlement: receipt, verb, answer"""
        self.tokens: set[str] = set()
        self.history: list[Failure] = []
        self.reason: str | None = None
        self.progress: float | str | None = None
        self.result: bytes | None = None
        self.result_until = 0.0

    def is_of(self, payload: bytes) -> bool:
        """Whether the task has, or had, this payload."""
        if self.digest is None:
            return self.task.payload == payload
        return self.digest == _digest(payload)

    def shed(self) -> None:
        """Let go of a long payload: an ended task is kept to recognise it, not to run it again."""
        if self.digest is None and len(self.task.payload) > _SMALL:
            self.digest = _digest(self.task.payload)
            self.task = msgspec.structs.replace(self.task, payload=b"null")

    def fail(self, error: str, now: float) -> None:
        """Add to the history; the oldest failures fall out."""
        self.history.append(Failure(attempt=self.attempt, at=now, error=error))
        del self.history[:-_HISTORY]

    @property
    def kept_until(self) -> float:
        """When an ended record may be forgotten, by the settings in force."""
        window = self.updated_at + self.queue.settings.dedupe_window
        return max(window, self.result_until) if self.result else window

    @property
    def dead_letter(self) -> DeadLetter:
        """The record as a dead letter."""
        return DeadLetter(
            task=self.task,
            attempt=self.attempt,
            losses=self.losses,
            reason=self.reason or "",
            failed_at=self.updated_at,
            history=tuple(self.history),
        )

    @property
    def status(self) -> TaskStatus:
        """The record as a status."""
        return TaskStatus(
            key=self.task.key,
            task_id=self.task.id,
            state=self.state,
            attempt=self.attempt,
            losses=self.losses,
            updated_at=self.updated_at,
            progress=self.progress,
            error=self.reason or (self.history[-1].error if self.history else None),
        )


class Lane:
    """The waiting entries of one priority, in the order of becoming available; returned ones first.

    Entries leave lazily: one that was cancelled or moved meanwhile is dropped when it comes up, or once such entries
    outnumber the rest.
    """

    def __init__(self) -> None:
        self._bound = ROOM
        self._fresh: deque[tuple[int, Record]] = deque()
        self._returned: list[tuple[int, Record]] = []

    def append(self, record: Record) -> None:
        """Add a newly available entry."""
        if len(self._fresh) >= self._bound:  # before the new item, which waits only in a moment
            self._fresh = deque(item for item in self._fresh if _waits(item))
            self._bound = 2 * len(self._fresh) + ROOM
        self._fresh.append((record.seq, record))

    def put_back(self, record: Record) -> None:
        """Add a returned entry, at the place of its original sequence."""
        heapq.heappush(self._returned, (record.seq, record))

    def pop(self) -> Record | None:
        """Take the first entry."""
        record = self.peek()
        if record is not None:
            if self._returned:
                heapq.heappop(self._returned)
            else:
                self._fresh.popleft()
        return record

    def peek(self) -> Record | None:
        """Return the first entry, after dropping those that are out of date."""
        while self._returned:
            if _waits(self._returned[0]):
                return self._returned[0][1]
            heapq.heappop(self._returned)
        while self._fresh:
            if _waits(self._fresh[0]):
                return self._fresh[0][1]
            self._fresh.popleft()
        return None


def _waits(item: tuple[int, Record]) -> bool:
    seq, record = item
    return record.state is State.WAITING and record.seq == seq


def is_scheduled(record: Record, seq: int) -> bool:
    """Whether a record still waits for the date it had at that sequence."""
    return record.state is State.SCHEDULED and record.seq == seq


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()


class QueueState:
    """One queue: its records by id, its lanes, its counters."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.settings = QueueSettings()
        self.records: dict[str, Record] = {}
        self.dead: dict[str, Record] = {}
        self.subscribers: dict[Consumer, None] = {}
        self.waiting: dict[Consumer, None] = {}
        """subscribers in a waiting receive, the longest first"""
        self.scheduled = Agenda(is_scheduled)
        self.published = 0
        self.states: Counter[State] = Counter()
        self.delivered = self.redelivered = self.retried = self.lost = 0
        self._lanes: dict[int, Lane] = {}

    def lane(self, record: Record) -> Lane:
        """Return the lane of an entry."""
        priority = record.task.priority
        if priority not in self._lanes:
            self._lanes[priority] = Lane()
            self._lanes = dict(sorted(self._lanes.items(), reverse=True))
        return self._lanes[priority]

    def pop(self) -> Record | None:
        """Take the first waiting entry of the highest priority."""
        for lane in self._lanes.values():
            record = lane.pop()
            if record is not None:
                return record
        return None

    @property
    def ledger(self) -> Ledger:
        """The counters."""
        return Ledger(
            published=self.published, **{state.value: self.states[state] for state in State}
        )

    @property
    def stats(self) -> QueueStats:
        """The queue at a glance."""
        heads = [head for lane in self._lanes.values() if (head := lane.peek()) is not None]
        return QueueStats(
            key=self.key,
            ledger=self.ledger,
            oldest_waiting=min((head.available_at for head in heads), default=None),
            delivered=self.delivered,
            redelivered=self.redelivered,
            retried=self.retried,
            lost=self.lost,
            subscribers=len(self.subscribers),
        )
