"""The data of the store and its order, without policy: a record per task, a queue per key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

import msgspec

from taskqueue_core.authoring.fair_order import PriorityFloor
from taskqueue_core.authoring.helpers import UNLIMITED, QueueRoom, room_of
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.rate_limit import Bucket, bucket_after
from taskqueue_core.tasks import (
    Ledger,
    QueueStats,
    State,
)
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.lanes import Lane, Lanes, OrderingKeys
from taskqueue_memory.tenants import TenantItem, Tenants

_SMALL = 512  # bytes of a payload that are not worth a digest


class Consumer(Protocol):
    """An open subscription, as far as the store knows it."""

    consumer: str
    keys: tuple[str, ...]
    since: float
    owned: dict[str, TaskRecord]
    """what it has in flight, by receipt"""
    ready: dict[QueueState, None]
    """queues that may have work, the next one to be served first"""

    @property
    def in_flight(self) -> int:
        """How many deliveries it owns."""
        ...

    def new_receipt(self) -> str:
        """Return a receipt that cannot be guessed."""
        ...

    def wake(self) -> bool:
        """Wake a waiting receive; say whether there was one."""
        ...

    def revoke(self, receipt: str) -> None:
        """Note that a delivery is no longer owned."""
        ...

    async def close(self) -> None:
        """Release everything that is owned."""
        ...


class TaskRecord(TenantItem, kw_only=True, eq=False):
    """An entry and its place."""

    queue: QueueState
    digest: bytes | None = None
    """what is kept of a long payload after the end"""
    owner: Consumer | None = None
    patience: float = 0.0
    """how long its delivery may be without progress"""
    watch: int = 0
    """names the date on which that is over; 0 for no such date"""

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


def is_scheduled(record: TaskRecord, seq: int) -> bool:
    """Whether a record still waits for the date it had at that sequence."""
    return record.state is State.SCHEDULED and record.seq == seq


def is_in_flight(record: TaskRecord, watch: int) -> bool:
    """Whether a record is still in the delivery, and without progress since, that was watched under that mark."""
    return record.watch == watch


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()


class QueueState:
    """One queue: its records by id, its waiting entries in their order, its counters."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.settings = QueueSettings()
        self.records: dict[str, TaskRecord] = {}
        self.dead: dict[str, TaskRecord] = {}
        self.subscribers: dict[Consumer, None] = {}
        self.waiting: dict[Consumer, None] = {}
        """subscribers in a waiting receive, the longest first"""
        self.scheduled = DueHeap(is_scheduled)
        self.flights = DueHeap(is_in_flight)
        self.bounded = False
        """a limit applies to publishes"""
        self.limited = False
        """a limit applies to deliveries"""
        self.bucket: Bucket | None = None
        self.alarm: Consumer | None = None
        """the waiting subscription whose timer wakes it when there is a token"""
        self.alarm_at = 0.0
        self.published = 0
        self.fresh = 0
        """tasks that were never delivered: they count against the capacity"""
        self.states: Counter[State] = Counter()
        self.delivered = self.redelivered = self.retried = self.lost = 0
        self.available = 0
        """entries that wait only for a limit"""
        self.turns: OrderingKeys[TaskRecord] = OrderingKeys()
        self.fair: Tenants[TaskRecord] | None = None
        """the lines, if the order is fair"""
        self._lines: Lanes[TaskRecord] | Tenants[TaskRecord] = Lanes()
        self._floor: PriorityFloor | None = None
        self._choice = False
        """several priorities could be served when the last entry was taken"""

    def configure(self, settings: QueueSettings, now: float) -> None:
        """Put settings in force, on what waits too."""
        before, self.settings, self.alarm = self.settings, settings, None
        self.bucket = bucket_after(self.bucket, before.rate_limit, settings.rate_limit, now)
        self.bounded = bool(
            settings.capacity
            or settings.tenant_capacity
            or settings.intake_paused
            or settings.moved_to
        )
        self.limited = bool(
            settings.paused
            or settings.max_inflight
            or settings.rate_limit
            or settings.tenant_max_inflight
            or settings.tenant_rate_limit
        )
        self._floor = (self._floor or PriorityFloor()) if settings.floor_share else None
        if settings.order is not before.order:
            self._reorder(settings)
        if self.fair is not None:
            self.fair.configure(settings, now)

    def room(self, now: float) -> QueueRoom:
        """Return what the limits leave to be delivered."""
        if not self.limited:
            return UNLIMITED
        room = room_of(self.settings, self.bucket, self.states[State.IN_FLIGHT], now)
        return room if self.fair is None else self.fair.narrow(room, self.available, now)

    @property
    def ready(self) -> int:
        """How many entries wait for no limit but the queue's own."""
        return self.available - (0 if self.fair is None else self.fair.resting)

    # order

    def lane(self, record: TaskRecord) -> Lane[TaskRecord]:
        """Return the lane that an entry is about to enter."""
        return self._lines.lane(record)

    def append(self, record: TaskRecord) -> None:
        """Have a newly available entry wait."""
        self._lines.lane(record).append(record)
        self._offered(record)

    def let_in(self, record: TaskRecord, now: float) -> None:
        """Have an entry wait at its place that waited for its ordering key until now."""
        self._lines.lane(record).let_in(record)
        self._offered(record)
        if self.fair is not None:
            self.fair.entered(record, 0, now)

    def put_back(self, record: TaskRecord) -> None:
        """Have a returned entry wait."""
        self._lines.lane(record).put_back(record)
        self._offered(record)

    def withdraw(self, record: TaskRecord) -> None:
        """Note that an entry is about to wait no more."""
        if record.held:
            record.held = False
        else:
            self.available -= 1
            if self.fair is not None:
                self.fair.withdrawn(record)

    def pop(self) -> TaskRecord | None:
        """Take the waiting entry that is next."""
        if self._floor is None:
            return self._lines.pop()
        heads = self._lines.heads()
        self._choice = len(heads) > 1
        if self._choice and self._floor.is_next(self.settings.floor_share):
            return heads[-1].pop()
        return self._lines.pop()

    def handed_out(self, record: TaskRecord, now: float) -> None:
        """Charge for an entry that is about to be in flight."""
        self.delivered += 1
        if self.bucket is not None:
            self.bucket.tokens -= 1
        if self.fair is not None:
            self.fair.handed_out(record, now)
        if self._floor is not None and self._choice:
            self._floor.handed_out(self.settings.floor_share)

    def _offered(self, record: TaskRecord) -> None:
        self.available += 1
        if self.fair is not None:
            self.fair.offered(record)

    def _reorder(self, settings: QueueSettings) -> None:
        """Have all that waits do so in the other order. What does not wait counts for its tenant when it does."""
        former, self.available = tuple(self._lines), 0
        for record in self.records.values():
            record.usage, record.seated = None, False
        self.fair = Tenants(settings) if settings.order is Order.FAIR else None
        self._lines = Lanes() if self.fair is None else self.fair
        for record in _by_position(record for lane in former for record in lane.returned()):
            self.put_back(record)
        for record in _by_position(record for lane in former for record in lane.others()):
            self.append(record)
        if self.fair is not None:
            for record in (record for lane in self.turns for record in lane.others()):
                self.fair.attach(record)

    # statistics

    @property
    def ledger(self) -> Ledger:
        """The counters."""
        return Ledger(
            published=self.published, **{state.value: self.states[state] for state in State}
        )

    @property
    def stats(self) -> QueueStats:
        """The queue at a glance."""
        ages = [lane.oldest() for lane in (*self._lines, *self.turns)]
        return QueueStats(
            key=self.key,
            ledger=self.ledger,
            oldest_waiting=min((age for age in ages if age is not None), default=None),
            delivered=self.delivered,
            redelivered=self.redelivered,
            retried=self.retried,
            lost=self.lost,
            subscribers=len(self.subscribers),
        )


def _by_position(records: Iterable[TaskRecord]) -> list[TaskRecord]:
    return sorted(records, key=lambda record: record.seq)
