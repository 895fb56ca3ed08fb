"""The fair order: within a priority, tenants take turns. A tenant that is paused or at one of its limits is skipped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from taskqueue_core.authoring.fair_order import FairRotation
from taskqueue_core.authoring.helpers import QueueRoom, room_of
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.rate_limit import Bucket, bucket_after
from taskqueue_core.tasks import State
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.lanes import Lane, LaneItem

_DUST = 1e-6


class TenantUsage:
    """Counters and limits of one tenant, kept while the tenant has tasks or its token bucket is not full."""

    __slots__ = ("alarm", "bucket", "fills", "fresh", "in_flight", "lanes", "name", "resting", "waiting")  # fmt: skip

    def __init__(self, name: str | None, bucket: Bucket | None) -> None:
        self.name = name
        self.lanes: dict[int, _TenantLane] = {}
        """non-empty lanes by priority"""
        self.waiting = 0
        """number of entries in the tenant's lanes"""
        self.fresh = 0
        """number of tasks that were never delivered"""
        self.in_flight = 0
        self.bucket = bucket
        self.resting = False
        self.alarm = 0
        """id of the scheduled time at which the rate limit allows the next delivery; 0 if no time is scheduled"""
        self.fills = 0
        """id of the scheduled time at which the bucket is full again; 0 if no time is scheduled"""

    @property
    def idle(self) -> bool:
        """Whether the tenant has no waiting task, no undelivered task and no task in flight."""
        return not (self.waiting or self.fresh or self.in_flight)


class _TenantLane(Lane[Any]):
    def __init__(self, account: TenantUsage) -> None:
        super().__init__()
        self.usage = account
        self.count = 0
        """number of waiting entries in this lane"""
        self.spent: int | None = None
        """cost of this lane's deliveries at the time when its tenant reached a limit; None until then"""


class TenantItem(LaneItem, kw_only=True, eq=False):
    """An entry that is counted for its tenant if the order is fair."""

    usage: TenantUsage | None = None
    """counters of the entry's tenant; None unless the order is fair"""
    seated: bool = False
    """whether the tenant's counters include this entry as in flight"""


T = TypeVar("T", bound=TenantItem)


class Tenants(Generic[T]):
    """The waiting entries of a queue in fair order. Adding or taking an entry takes O(log n) time for n tenants."""

    def __init__(self, settings: QueueSettings) -> None:
        self.resting = 0
        """number of waiting entries whose tenant is paused or has reached a limit"""
        self._accounts: dict[str | None, TenantUsage] = {}
        self._walks: dict[int, FairRotation[_TenantLane]] = {}
        self._marks = itertools.count(1)
        self._adopt(settings)

    def __iter__(self) -> Iterator[Lane[Any]]:
        for account in self._accounts.values():
            yield from account.lanes.values()

    def configure(self, settings: QueueSettings, now: float) -> None:
        """Apply the limits and weights of new settings to all tenants."""
        before = self._limits.rate_limit
        self._adopt(settings)
        for account in tuple(self._accounts.values()):
            account.alarm = account.fills = 0
            account.bucket = bucket_after(account.bucket, before, self._limits.rate_limit, now)
            self._review(account, now)

    def attach(self, record: T) -> TenantUsage:
        """Count an entry for its tenant, and return the tenant's counters."""
        name = record.task.tenant
        account = self._accounts.get(name)
        if account is None:
            limit = self._limits.rate_limit
            account = self._accounts[name] = TenantUsage(name, bucket_after(None, None, limit, 0.0))
            account.resting = name in self._paused
        if record.usage is not account:
            record.usage = account
            account.fresh += record.counted
        return account

    def fresh(self, name: str | None) -> int:
        """Return how many tasks of a tenant were never delivered."""
        account = self._accounts.get(name)
        return 0 if account is None else account.fresh

    def lane(self, record: T) -> Lane[Any]:
        """Return the lane of an entry's tenant and priority; create it if it does not exist."""
        account, priority = self.attach(record), record.task.priority
        if priority not in account.lanes:
            account.lanes[priority] = _TenantLane(account)
        return account.lanes[priority]

    def offered(self, record: T) -> None:
        """Count an entry that has entered its lane. With its first entry, a tenant joins the rotation."""
        account, lane = self._lane_of(record)
        lane.count += 1
        account.waiting += 1
        if account.resting:
            self.resting += 1
        elif lane.count == 1:
            self._walk(record.task.priority).join(lane)

    def withdrawn(self, record: T) -> None:
        """Count an entry that has left its lane. With its last entry, a tenant leaves the rotation."""
        account, lane = self._lane_of(record)
        lane.count -= 1
        account.waiting -= 1
        if account.resting:
            self.resting -= 1
            account.alarm = account.alarm if account.waiting else 0
        if not lane.count:
            del account.lanes[record.task.priority]
            if not account.resting:
                self._walk(record.task.priority).leave(lane)

    def handed_out(self, record: T, now: float) -> None:
        """Charge a delivery to its tenant's turn and rate limit."""
        account, lane = self._lane_of(record)
        weight = self._weights.get(account.name or "", 1) if self._weights else 1
        self._walks[record.task.priority].spend(lane, weight)
        if account.bucket is not None and self._limits.rate_limit is not None:
            account.bucket.fill(self._limits.rate_limit, now)
            account.bucket.tokens -= 1

    def entered(self, record: T, fresh: int, now: float) -> None:
        """Update the tenant's counters after a state change; ``fresh`` is added to the number of undelivered tasks."""
        account = record.usage
        if account is None:  # not counted yet: the entry has not waited since the order became fair
            return
        account.fresh += fresh
        seated = record.state is State.IN_FLIGHT
        account.in_flight += seated - record.seated
        record.seated = seated
        if self._limited or not (account.waiting or account.fresh or account.in_flight):
            self._review(account, now)
            self.forget(now, 2)

    def pop(self) -> T | None:
        """Remove and return the first entry of the next tenant at the highest priority that can be served, or None."""
        for walk in self._walks.values():
            lane = walk.next()
            if lane is not None:
                return lane.pop()
        return None

    def heads(self) -> dict[int, Lane[Any]]:
        """Return the next tenant's lane of each priority that can be served, the highest priority first."""
        return {n: lane for n, walk in self._walks.items() if (lane := walk.next()) is not None}

    def narrow(self, room: QueueRoom, available: int, now: float) -> QueueRoom:
        """Return the queue's ``room``, reduced by the limits of the tenants that have waiting entries."""
        if self._openings:
            for account in tuple(self._openings.take(now)):
                account.alarm = 0
                self._review(account, now)
        ready = available - self.resting
        if ready:
            return QueueRoom(min(room.left, ready), room.opens_at)
        opens_at = self._openings.next_at()
        if room.left or opens_at is None:
            return QueueRoom(0, opens_at)
        return QueueRoom(0, None if room.opens_at is None else max(opens_at, room.opens_at))

    def forget(self, now: float, chunk: int) -> float:
        """Delete the counters of up to ``chunk`` tenants that have no tasks and a full bucket.

        Return when the next counters may be deleted; infinity if none.
        """
        for account in tuple(self._fillings.take(now, chunk)) if self._fillings else ():
            account.fills = 0
            if account.idle:
                self._retire(account, now)
        return self._fillings.first

    def _adopt(self, settings: QueueSettings) -> None:
        self._limits = QueueSettings(
            max_inflight=settings.tenant_max_inflight, rate_limit=settings.tenant_rate_limit
        )
        self._weights = settings.weights
        self._paused: frozenset[str | None] = frozenset(settings.paused_tenants)
        self._limited = bool(settings.tenant_max_inflight or settings.tenant_rate_limit)
        self._openings = DueHeap[TenantUsage](lambda account, mark: account.alarm == mark)
        self._fillings = DueHeap[TenantUsage](lambda account, mark: account.fills == mark)

    def _lane_of(self, record: T) -> tuple[TenantUsage, _TenantLane]:
        account = record.usage or self.attach(record)
        return account, account.lanes[record.task.priority]

    def _walk(self, priority: int) -> FairRotation[_TenantLane]:
        if priority not in self._walks:
            self._walks[priority] = FairRotation()
            self._walks = dict(sorted(self._walks.items(), reverse=True))
        return self._walks[priority]

    def _review(self, account: TenantUsage, now: float) -> None:
        """Stop serving a tenant that is paused or at a limit, and serve it again once nothing forbids it."""
        if account.resting or self._may_rest(account):
            room = QueueRoom(0, None)
            if account.name not in self._paused:
                room = room_of(self._limits, account.bucket, account.in_flight, now)
            if bool(room.left) is account.resting:
                (self._wake if account.resting else self._rest)(account)
            if room.opens_at is not None and account.waiting and not account.alarm:
                account.alarm = next(self._marks)
                self._openings.add(room.opens_at, account, account.alarm)
        if account.idle:
            self._retire(account, now)

    def _may_rest(self, account: TenantUsage) -> bool:
        """Return whether a tenant is paused or may have reached a limit. Fast: it does not refill the bucket."""
        if account.name in self._paused:
            return True
        most, bucket = self._limits.max_inflight, account.bucket
        if most and account.in_flight >= most:
            return True
        return bucket is not None and bucket.tokens < 1

    def _rest(self, account: TenantUsage) -> None:
        account.resting = True
        self.resting += account.waiting
        for priority, lane in account.lanes.items():
            lane.spent = self._walk(priority).leave(lane)

    def _wake(self, account: TenantUsage) -> None:
        account.resting, account.alarm = False, 0
        self.resting -= account.waiting
        for priority, lane in account.lanes.items():
            if lane.spent is None:
                self._walk(priority).join(lane)
            else:
                self._walk(priority).come_back(lane, lane.spent)

    def _retire(self, account: TenantUsage, now: float) -> None:
        """Delete the counters of a tenant without tasks, once its bucket is full again."""
        limit, bucket = self._limits.rate_limit, account.bucket
        if limit is not None and bucket is not None:
            bucket.fill(limit, now)
            missing = limit.max_tokens - bucket.tokens
            if missing > _DUST:
                if not account.fills:
                    account.fills = next(self._marks)
                    full_at = bucket.at + missing * limit.period / limit.max_tokens
                    self._fillings.add(full_at, account, account.fills)
                return
        if self._accounts.get(account.name) is account:
            del self._accounts[account.name]
