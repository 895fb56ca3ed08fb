# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Backends that each break one promise about the order of deliveries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from taskqueue_core.authoring.fair_order import FairRotation, PriorityFloor
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.tasks import Confirmation, Delivery, Received, Settled, State, Task
from taskqueue_memory.lanes import Lane, OrderingKeys
from taskqueue_memory.records import TaskRecord
from taskqueue_memory.tenants import Tenants
from tests.conformance.broken_limits import LyingControl, queue_of
from tests.conformance.facade import Facade, FacadeControl, FacadePublisher, FacadeSubscription

_PLAIN: dict[str, Any] = {
    "order": Order.FIFO,
    "weights": {},
    "paused_tenants": (),
    "tenant_capacity": None,
    "tenant_max_inflight": None,
    "tenant_rate_limit": None,
}


class ForgetsTenants(LyingControl):
    """Defect: fair order has no effect: all tasks are delivered in the order of their arrival."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - the defect ignores it
        return _PLAIN


class IgnoresWeights(LyingControl):
    """Defect: all tenants have the same weight."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - the defect ignores it
        return {"weights": {}}


class IgnoresPausedTenants(LyingControl):
    """Defect: tasks of paused tenants are delivered."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - the defect ignores it
        return {"paused_tenants": ()}


class _CreditWalk(FairRotation[Any]):
    def join(self, who: Any) -> None:
        self._push(who, 0)


class SavesTurns(FacadeControl):
    """Defect: a tenant that returns gets all the turns that it missed."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        if (fair := queue_of(self.facade, key).fair) is not None:
            fair._walks.setdefault(5, _CreditWalk())
        return confirmed


class StartsAnew(FacadeSubscription):
    """Defect: each receive starts with the same tenant."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        for fair in _fair_ones(self):
            for priority, walk in fair._walks.items():
                fresh: FairRotation[Any] = FairRotation()
                fair._walks[priority] = fresh
                for lane in sorted(walk._positions, key=lambda one: str(one.usage.name)):
                    fresh.join(lane)
        return await super().receive(limit, timeout)


class ReturnedJumps(FacadeSubscription):
    """Defect: a released task is delivered before those of other tenants."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        answers = await super().redeliver(*deliveries, lost=lost)
        for record in _records(self.facade, *deliveries):
            fair = record.queue.fair
            if fair is not None and record.state is State.WAITING and record.usage is not None:
                lane = record.usage.lanes[record.task.priority]
                fair._walk(record.task.priority)._push(lane, -1)
        return answers


class DropsOnSwap(FacadeControl):
    """Defect: changing the order of a queue removes its waiting tasks."""

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        if settings.order is not queue_of(self.facade, key).settings.order:
            await self.inner.purge(key)
        return await self.inner.configure(key, settings)


class SwapsLater(LyingControl):
    """Defect: a change to fair order does not apply while tasks are waiting."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        changes = settings.order is not queue_of(self.facade, self.key).settings.order
        busy = queue_of(self.facade, self.key).states[State.WAITING]
        return _PLAIN if changes and busy else {}


class TenantHoldsUpAll(FacadeSubscription):
    """Defect: a tenant at its limit stops deliveries to other tenants."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        if timeout == 0 and any(fair.resting for fair in _fair_ones(self)):
            return Received()
        return await super().receive(min(limit, 1), timeout)


class GivesTenantsOneTooMany(LyingControl):
    """Defect: a tenant has one delivery more in flight than its limit allows."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        bound = settings.tenant_max_inflight
        return {"tenant_max_inflight": bound and bound + 1}


class RefundsTenants(FacadeSubscription):
    """Defect: releasing a delivery gives the token of its tenant back."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        for record in _records(self.facade, *deliveries):
            if record.usage is not None and record.usage.bucket is not None:
                record.usage.bucket.tokens += 1
        return await super().redeliver(*deliveries, lost=lost)


class UnboundedByTenants(LyingControl):
    """Defect: a capacity per tenant removes the capacity of the queue."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        return {} if settings.tenant_capacity is None else {"capacity": None}


class ChargesTenantsForRetries(FacadePublisher):
    """Defect: a retry counts against the capacity of its tenant."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        answer = await super().schedule_retry(task, at, **options)
        queue = queue_of(self.facade, task.key)
        if queue.fair is not None:
            queue.fair.attach(queue.records[task.id]).fresh += 1
        return answer


class ForgetsEntities(FacadePublisher):
    """Defect: ordering keys are silently ignored."""

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(
            *(msgspec.structs.replace(task, ordering_key=None) for task in tasks)
        )


class ReleasesOnHandBack(FacadeSubscription):
    """Defect: a released task no longer holds its ordering key."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        answers = await super().redeliver(*deliveries, lost=lost)
        for record in _records(self.facade, *deliveries):
            _release(self.facade, record)
        return answers


class ReleasesOnRetry(FacadePublisher):
    """Defect: a task with a scheduled retry no longer holds its ordering key."""

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        answer = await super().schedule_retry(task, at, **options)
        _release(self.facade, queue_of(self.facade, task.key).records[task.id])
        return answer


class _ClingingTurns(OrderingKeys[Any]):
    def goes(self, record: TaskRecord, key: str) -> TaskRecord | None:
        return None if record.state is State.DEAD else super().goes(record, key)


class _ClassyTurns(OrderingKeys[Any]):
    def goes(self, record: TaskRecord, key: str) -> TaskRecord | None:
        held = sorted(self._held[key].others(), key=_rank) if key in self._held else []
        self._held[key] = Lane()
        for one in held:
            self._held[key].append(one)
        return super().goes(record, key)


class _OtherTurns(FacadePublisher):
    turns: type[OrderingKeys[Any]]

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for task in tasks:
            queue = queue_of(self.facade, task.key)
            if type(queue.turns) is OrderingKeys:
                queue.turns = self.turns()
        return await super().publish(*tasks)


class HoldsForTheDead(_OtherTurns):
    """Defect: a dead task still holds its ordering key."""

    turns = _ClingingTurns


class ReleasesByPriority(_OtherTurns):
    """Defect: an ordering key goes to the waiting task with the highest priority instead of the oldest."""

    turns = _ClassyTurns


class Starves(LyingControl):
    """Defect: a lower priority is not served while a higher one has tasks waiting."""

    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - the defect ignores it
        return {"floor_share": 0.0}


class OwesTheAbsent(FacadeSubscription):
    """Defect: the share of the lower priorities accumulates while they have no waiting tasks."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        for key in self.inner.keys:
            queue = queue_of(self.facade, key)
            if queue._floor is not None and len(queue._choice) < 2:
                queue._floor.owed += queue.settings.floor_share * len(received.deliveries)
        return received


class _LowestFloor(PriorityFloor):
    def next(self, share: float, priorities: Sequence[int]) -> int:
        return len(priorities) - 1 if super().next(share, priorities) else 0


class ServesTheLowest(FacadeSubscription):
    """Defect: only the lowest priority has a share; the ones in between starve."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        for key in self.inner.keys:
            queue = queue_of(self.facade, key)
            if type(queue._floor) is PriorityFloor:
                queue._floor = _LowestFloor()
        return await super().receive(limit, timeout)


def _fair_ones(subscription: FacadeSubscription) -> Iterator[Tenants[Any]]:
    for key in subscription.inner.keys:
        fair = queue_of(subscription.facade, key).fair
        if fair is not None:
            yield fair


def _records(facade: Facade, *deliveries: Delivery) -> list[TaskRecord]:
    found = [facade.inner._store.find(one.task.key, one.task.id) for one in deliveries]
    return [record for record in found if record is not None]


def _release(facade: Facade, record: TaskRecord) -> None:
    if record.task.ordering_key is not None:
        facade.inner._store._pass_key_on(record, record.task.ordering_key)


def _rank(record: TaskRecord) -> tuple[int, int]:
    return -record.task.priority, record.seq
