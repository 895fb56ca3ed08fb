"""What the store keeps: a record per task, lanes of waiting entries, a queue per key. Data and its order, no policy."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from hashlib import blake2b
from typing import Protocol

import msgspec

from taskqueue_core.authoring import UNLIMITED, Room, room_of
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.entries import Entry
from taskqueue_core.flow import Bucket, bucket_after
from taskqueue_core.tasks import (
    Ledger,
    QueueStats,
    State,
)
from taskqueue_memory.agenda import ROOM, Agenda

__all__ = ["Consumer", "Lane", "QueueState", "Record", "is_scheduled"]

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

    @property
    def in_flight(self) -> int:
        """How many deliveries it owns."""
        ...

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


class Record(Entry, kw_only=True, eq=False):
    """An entry and its place."""

    queue: QueueState
    digest: bytes | None = None
    """what is kept of a long payload after the end"""
    seq: int = 0
    """its place in its lane; an item of a lane or heap with another one is out of date"""
    available_at: float = 0.0
    owner: Consumer | None = None

    def is_of(self, payload: bytes) -> bool:
        """See `Entry.is_of`: also of a payload that was let go."""
        if self.digest is None:
            return self.task.payload == payload
        return self.digest == _digest(payload)

    def shed(self) -> None:
        """Let go of a long payload: an ended task is kept to recognise it, not to run it again."""
        if self.digest is None and len(self.task.payload) > _SMALL:
            self.digest = _digest(self.task.payload)
            self.task = msgspec.structs.replace(self.task, payload=b"null")

    @property
    def kept_until(self) -> float:
        """When an ended record may be forgotten, by the settings in force."""
        window = self.updated_at + self.queue.settings.dedupe_window
        return max(window, self.result_until) if self.result else window


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
        self.bounded = False
        """something limits what is taken in"""
        self.limited = False
        """something limits what is handed out"""
        self.bucket: Bucket | None = None
        self.alarm: Consumer | None = None
        """who, of those that wait, wakes by itself when there is a token"""
        self.published = 0
        self.fresh = 0
        """tasks that were never handed out: they count against the capacity"""
        self.states: Counter[State] = Counter()
        self.delivered = self.redelivered = self.retried = self.lost = 0
        self._lanes: dict[int, Lane] = {}

    def configure(self, settings: QueueSettings, now: float) -> None:
        """Put settings in force."""
        self.bucket = bucket_after(self.bucket, self.settings.rate_limit, settings.rate_limit, now)
        self.settings, self.alarm = settings, None
        self.bounded = settings.capacity is not None or settings.intake_paused
        self.limited = bool(settings.paused or settings.max_inflight or settings.rate_limit)

    def room(self, now: float) -> Room:
        """Say what the limits leave to be handed out."""
        if not self.limited:
            return UNLIMITED
        return room_of(self.settings, self.bucket, self.states[State.IN_FLIGHT], now)

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
