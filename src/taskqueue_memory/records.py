"""Data structures of the memory backend: a `TaskRecord` per task and a `QueueState` per queue."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from taskqueue_core.authoring.fair_order import PriorityFloor
from taskqueue_core.authoring.helpers import UNLIMITED, QueueRoom, room_of
from taskqueue_core.authoring.listings import ENDED
from taskqueue_core.authoring.waits import Change, Note
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import Clock
from taskqueue_core.rate_limit import Bucket, bucket_after
from taskqueue_core.tasks import (
    Ledger,
    QueueStats,
    State,
)
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.event_streams import MemoryEventStream
from taskqueue_memory.lanes import Lanes, OrderingKeys
from taskqueue_memory.tag_index import TagIndex
from taskqueue_memory.tenants import TenantItem, Tenants
from taskqueue_memory.unique_keys import UniqueKeys


class Consumer(Protocol):
    """The part of an open subscription that the store uses."""

    consumer: str
    keys: tuple[str, ...]
    since: float
    owned: dict[str, TaskRecord]
    """records of the deliveries that the subscription owns, by receipt"""
    ready: dict[QueueState, None]
    """queues that may have work, in the order in which they are served"""

    @property
    def in_flight(self) -> int:
        """The number of deliveries that the subscription owns."""

    def new_receipt(self) -> str:
        """Return a new receipt that cannot be guessed."""

    def wake(self) -> bool:
        """Wake a waiting receive call. Return whether a call was waiting."""

    def revoke(self, receipt: str) -> None:
        """Record that the subscription no longer owns a delivery."""

    async def close(self) -> None:
        """Release all deliveries that the subscription owns."""


class TaskSteps(Protocol):
    """The part of the state changes that links and batches use."""

    clock: Clock

    def find(self, key: str, task_id: str) -> TaskRecord | None:
        """Return the record of a task; ``None`` if there is none."""

    def unblock(self, record: TaskRecord, change: Change) -> None:
        """End the wait of a blocked task."""


class TaskRecord(TenantItem, kw_only=True, eq=False):
    """A task's entry, with its queue and the subscription that owns its delivery."""

    queue: QueueState
    owner: Consumer | None = None
    watch: int = 0
    """id of the current progress timeout; 0 if there is none"""
    notes: dict[Note, None] | None = None
    """the tasks that wait for this one, the oldest first"""
    linked: bool = False
    """whether other tasks wait for this one, or it waits for them"""

    stream: MemoryEventStream | None = None
    """the events of the task, if it has streamed any"""

    @property
    def stream_until(self) -> float:
        """The time until which the events of a task that has ended, or of a dead letter, are kept."""
        return self.updated_at + self.queue.settings.stream_ttl

    @property
    def needed_until(self) -> float:
        """The time until which an ended record is needed for other purposes than lists, by the current settings."""
        window = self.updated_at + self.queue.settings.dedupe_window
        if self.task.unique is not None:
            window = max(window, self.period_end)
        if self.stream is not None:
            window = max(window, self.stream_until)
        return max(window, self.result_until) if self.result else window

    @property
    def kept_until(self) -> float:
        """The time at which an ended record may be deleted, by the current settings."""
        if self.replaced is not None:
            return self.needed_until
        return max(self.needed_until, self.updated_at + self.queue.settings.keep_ended)


def is_scheduled(record: TaskRecord, seq: int) -> bool:
    """Return whether a record is still scheduled for the time that was set together with sequence number ``seq``."""
    return record.state is State.SCHEDULED and record.seq == seq


def is_in_flight(record: TaskRecord, watch: int) -> bool:
    """Return whether a delivery is still in flight, without progress since the timeout with id ``watch`` was set."""
    return record.watch == watch


class QueueState:
    """One queue: its records by task id, its waiting entries in their order, and its counters."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.settings = QueueSettings()
        self.records: dict[str, TaskRecord] = {}
        self.dead: dict[str, TaskRecord] = {}
        self.unique = UniqueKeys[TaskRecord]()
        self.tags = TagIndex[TaskRecord]()
        self.kept: dict[State, dict[TaskRecord, None]] = {state: {} for state in ENDED}
        """by state, the ended records that only lists need, the oldest first"""
        self.removed: Counter[State] = Counter()
        """by state, the number of ended tasks whose records were deleted"""
        self.changed: deque[TaskRecord] | None = None
        """records that may have another place in the lists; ``None`` if no lists are read"""
        self.subscribers: dict[Consumer, None] = {}
        self.waiting: dict[Consumer, None] = {}
        """subscriptions with a waiting receive call, the longest-waiting first"""
        self.scheduled = DueHeap(is_scheduled)
        self.flights = DueHeap(is_in_flight)
        self.bounded = False
        """whether a limit applies to publishing"""
        self.limited = False
        """whether a limit applies to deliveries"""
        self.bucket: Bucket | None = None
        self.alarm: Consumer | None = None
        """the waiting subscription that has a timer for the time at which a limit allows a delivery again"""
        self.alarm_at = 0.0
        self.published = 0
        self.empty: tuple[int, float] | None = None
        """set when maintenance first finds the queue empty: number of tasks ever published, and the time"""
        self.fresh = 0
        """number of tasks that were never delivered, which count against the capacity"""
        self.states = dict.fromkeys(State, 0)
        """number of tasks by state"""
        self.blocked_on_dead = 0
        """number of blocked tasks that dead letters hold"""
        self.delivered = self.redelivered = self.retried = self.lost = 0
        self.available = 0
        """number of waiting entries in lanes, which excludes those that wait for an ordering key"""
        self.turns: OrderingKeys[TaskRecord] = OrderingKeys()
        self.fair: Tenants[TaskRecord] | None = None
        """the waiting entries by tenant if the order is fair; None if it is fifo"""
        self._lines: Lanes[TaskRecord] | Tenants[TaskRecord] = Lanes()
        self._floor: PriorityFloor | None = None
        self._choice: list[int] = []
        """with a floor share: the priorities that could be served when the last entry was taken, the highest first"""

    def configure(self, settings: QueueSettings, now: float) -> None:
        """Apply new settings, also to the entries that are already waiting."""
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
            or settings.paused_tenants
        )
        self._floor = (self._floor or PriorityFloor()) if settings.floor_share else None
        if settings.order is not before.order:
            self._reorder(settings)
        if self.fair is not None:
            self.fair.configure(settings, now)

    def clear(self, record: TaskRecord) -> None:
        """Remove a record that is deleted, or that another one with its id takes the place of, from the indexes."""
        self.unique.remove(record)
        self.tags.remove(record)
        if record.ended and record.replaced is None and record.state is not None:
            self.removed[record.state] += 1
            self.kept[record.state].pop(record, None)

    def surplus(self) -> Iterator[TaskRecord]:
        """Yield the ended records that are more than `QueueSettings.keep_ended_most` allows, the oldest first."""
        most = self.settings.keep_ended_most
        for state, kept in self.kept.items():
            number = self.states[state] - self.removed[state] - most
            yield from islice(kept, max(number, 0))

    def room(self, now: float) -> QueueRoom:
        """Return how many deliveries the limits allow now, and when they will allow the next delivery."""
        if not self.limited:
            return UNLIMITED
        room = room_of(self.settings, self.bucket, self.states[State.IN_FLIGHT], now)
        return room if self.fair is None else self.fair.narrow(room, self.available, now)

    @property
    def ready(self) -> int:
        """The number of entries in lanes whose tenant has not reached a limit."""
        return self.available - (0 if self.fair is None else self.fair.resting)

    def append(self, record: TaskRecord) -> None:
        """Add a newly available entry at the end of its lane."""
        self._lines.lane(record).append(record)
        self.available += 1  # as in `_offered`, because each publish comes here
        if self.fair is not None:
            self.fair.offered(record)

    def let_in(self, record: TaskRecord, now: float) -> None:
        """Insert an entry that has just obtained its ordering key, at the position of its sequence number."""
        self._lines.lane(record).let_in(record)
        self._offered(record)
        if self.fair is not None:
            self.fair.entered(record, 0, now)

    def put_back(self, record: TaskRecord) -> None:
        """Insert a redelivered entry at its old position."""
        self._lines.lane(record).put_back(record)
        self._offered(record)

    def withdraw(self, record: TaskRecord) -> None:
        """Update the counters for an entry that is about to leave the state WAITING."""
        if record.held:
            record.held = False
        else:
            self.available -= 1
            if self.fair is not None:
                self.fair.withdrawn(record)

    def pop(self) -> TaskRecord | None:
        """Remove and return the entry that is delivered next; return None if no entry can be delivered."""
        if self._floor is None:
            return self._lines.pop()
        heads = self._lines.heads()
        self._choice = list(heads)
        place = self._floor.next(self.settings.floor_share, self._choice)
        return heads[self._choice[place]].pop() if place else self._lines.pop()

    def handed_out(self, record: TaskRecord, now: float) -> None:
        """Count a delivery, and charge it to the rate limits, the tenant and the floor share."""
        self.delivered += 1
        if self.bucket is not None:
            self.bucket.tokens -= 1
        if self.fair is not None:
            self.fair.handed_out(record, now)
        if self._floor is not None:
            self._floor.handed_out(self.settings.floor_share, self._choice)

    def _offered(self, record: TaskRecord) -> None:
        self.available += 1
        if self.fair is not None:
            self.fair.offered(record)

    def _reorder(self, settings: QueueSettings) -> None:
        """Move waiting entries to lanes of the new order. Other entries are counted for their tenant once they wait."""
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

    @property
    def ledger(self) -> Ledger:
        return Ledger(
            published=self.published, **{state.value: self.states[state] for state in State}
        )

    @property
    def stats(self) -> QueueStats:
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
            blocked_on_dead=self.blocked_on_dead,
        )


def _by_position(records: Iterable[TaskRecord]) -> list[TaskRecord]:
    return sorted(records, key=lambda record: record.seq)
