"""Backends that break one promise each about who is next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.order import Walk
from taskqueue_core.tasks import Confirmation, Delivery, Received, Settled, State, Task
from taskqueue_memory.lanes import Lane
from taskqueue_memory.records import Record
from taskqueue_memory.tenants import Tenants
from taskqueue_memory.turns import Turns
from tests.conformance.broken_limits import LyingControl, queue_of
from tests.conformance.facade import Facade, FacadeControl, FacadePublisher, FacadeSubscription

_PLAIN: dict[str, Any] = {
    "order": Order.FIFO,
    "weights": {},
    "tenant_capacity": None,
    "tenant_max_inflight": 0,
    "tenant_rate_limit": None,
}


# Turns


class _PlainControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - as the defect has it
        return _PLAIN


class ForgetsTenants(Facade):
    """First in, first out, whatever the order is."""

    control_type = _PlainControl


class _EvenControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - as the defect has it
        return {"weights": {}}


class IgnoresWeights(Facade):
    """All tenants weigh the same."""

    control_type = _EvenControl


class _CreditWalk(Walk[Any]):
    def join(self, who: Any) -> None:
        self._place(who, 0)


class _CreditControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        confirmed: QueueSettings = await self.inner.configure(key, settings)
        if (fair := queue_of(self.facade, key).fair) is not None:
            fair._walks.setdefault(5, _CreditWalk())
        return confirmed


class SavesTurns(Facade):
    """Who comes back has all the turns that it did not use."""

    control_type = _CreditControl


class _FirstAgainSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        for fair in _fair_ones(self):
            for priority, walk in fair._walks.items():
                fresh: Walk[Any] = Walk()
                fair._walks[priority] = fresh
                for lane in sorted(walk._places, key=lambda one: str(one.account.name)):
                    fresh.join(lane)
        return await super().receive(limit, timeout)


class StartsAnew(Facade):
    """Each receive begins with the same tenant."""

    subscription_type = _FirstAgainSubscription


class _JumpingSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        answers = await super().redeliver(*deliveries, lost=lost)
        for record in _records(self.facade, *deliveries):
            fair = record.queue.fair
            if fair is not None and record.state is State.WAITING and record.account is not None:
                lane = record.account.lanes[record.task.priority]
                fair._walk(record.task.priority)._place(lane, -1)
        return answers


class ReturnedJumps(Facade):
    """A hand-back comes before the other tenants."""

    subscription_type = _JumpingSubscription


class _DrainingControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        if settings.order is not queue_of(self.facade, key).settings.order:
            await self.inner.purge(key)
        return await self.inner.configure(key, settings)


class DropsOnSwap(Facade):
    """Another order is another queue, and what waited in the former one is gone."""

    control_type = _DrainingControl


class _LateControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        changes = settings.order is not queue_of(self.facade, self.key).settings.order
        busy = queue_of(self.facade, self.key).states[State.WAITING]
        return _PLAIN if changes and busy else {}


class SwapsLater(Facade):
    """What waits is handed out in the order in which it came, fair or not."""

    control_type = _LateControl


# Tenants


class _BlockingSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        if timeout == 0 and any(fair.resting for fair in _fair_ones(self)):
            return Received()
        return await super().receive(min(limit, 1), timeout)


class TenantHoldsUpAll(Facade):
    """A tenant at its limit holds up the others."""

    subscription_type = _BlockingSubscription


class _RoomyControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        bound = settings.tenant_max_inflight
        return {"tenant_max_inflight": bound and bound + 1}


class GivesTenantsOneTooMany(Facade):
    """A tenant has one more in flight than it may."""

    control_type = _RoomyControl


class _RefundingSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        for record in _records(self.facade, *deliveries):
            if record.account is not None and record.account.bucket is not None:
                record.account.bucket.tokens += 1
        return await super().redeliver(*deliveries, lost=lost)


class RefundsTenants(Facade):
    """What is handed back has cost its tenant no token."""

    subscription_type = _RefundingSubscription


class _EndlessControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:
        return {} if settings.tenant_capacity is None else {"capacity": None}


class UnboundedByTenants(Facade):
    """Where each tenant has its capacity the queue has none."""

    control_type = _EndlessControl


class _ChargingPublisher(FacadePublisher):
    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        answer = await super().schedule_retry(task, at, **options)
        queue = queue_of(self.facade, task.key)
        if queue.fair is not None:
            queue.fair.attach(queue.records[task.id]).fresh += 1
        return answer


class ChargesTenantsForRetries(Facade):
    """A retry takes room of its tenant."""

    publisher_type = _ChargingPublisher


# Entities


class _KeylessPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return await super().publish(
            *(msgspec.structs.replace(task, ordering_key=None) for task in tasks)
        )


class ForgetsEntities(Facade):
    """An ordering key is dropped without a word."""

    publisher_type = _KeylessPublisher


class _FreeingSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        answers = await super().redeliver(*deliveries, lost=lost)
        for record in _records(self.facade, *deliveries):
            _release(self.facade, record)
        return answers


class ReleasesOnHandBack(Facade):
    """A task that was handed back holds its ordering key no more."""

    subscription_type = _FreeingSubscription


class _FreeingPublisher(FacadePublisher):
    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        answer = await super().schedule_retry(task, at, **options)
        _release(self.facade, queue_of(self.facade, task.key).records[task.id])
        return answer


class ReleasesOnRetry(Facade):
    """A task whose retry is scheduled holds its ordering key no more."""

    publisher_type = _FreeingPublisher


class _ClingingTurns(Turns):
    def goes(self, record: Record, key: str) -> Record | None:
        return None if record.state is State.DEAD else super().goes(record, key)


class _ClassyTurns(Turns):
    def goes(self, record: Record, key: str) -> Record | None:
        held = sorted(self._held[key].others(), key=_rank) if key in self._held else []
        self._held[key] = Lane()
        for one in held:
            self._held[key].append(one)
        return super().goes(record, key)


class _OtherTurns(FacadePublisher):
    turns: type[Turns]

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for task in tasks:
            queue = queue_of(self.facade, task.key)
            if type(queue.turns) is Turns:
                queue.turns = self.turns()
        return await super().publish(*tasks)


class _ClingingPublisher(_OtherTurns):
    turns = _ClingingTurns


class HoldsForTheDead(Facade):
    """A dead task keeps its ordering key."""

    publisher_type = _ClingingPublisher


class _ClassyPublisher(_OtherTurns):
    turns = _ClassyTurns


class ReleasesByPriority(Facade):
    """Of those that wait for an ordering key the highest priority is next."""

    publisher_type = _ClassyPublisher


# The lowest priority


class _StrictControl(LyingControl):
    def twist(self, settings: QueueSettings) -> dict[str, Any]:  # noqa: ARG002 - as the defect has it
        return {"floor_share": 0.0}


class Starves(Facade):
    """As long as a higher priority waits a lower one has nothing."""

    control_type = _StrictControl


class _OwingSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        for key in self.inner.keys:
            queue = queue_of(self.facade, key)
            if queue._floor is not None and not queue._choice:
                queue._floor.owed += queue.settings.floor_share * len(received.deliveries)
        return received


class OwesTheAbsent(Facade):
    """The share of the lowest gathers while nothing of it is there."""

    subscription_type = _OwingSubscription


def _fair_ones(subscription: FacadeSubscription) -> Iterator[Tenants]:
    for key in subscription.inner.keys:
        fair = queue_of(subscription.facade, key).fair
        if fair is not None:
            yield fair


def _records(facade: Facade, *deliveries: Delivery) -> list[Record]:
    found = [facade.inner._store.find(one.task.key, one.task.id) for one in deliveries]
    return [record for record in found if record is not None]


def _release(facade: Facade, record: Record) -> None:
    if record.task.ordering_key is not None:
        facade.inner._store._pass_key_on(record, record.task.ordering_key)


def _rank(record: Record) -> tuple[int, int]:
    return -record.task.priority, record.seq
