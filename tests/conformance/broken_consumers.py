# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Subscriptions that each break one promise of the contract, most of them as a real backend once did."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from taskqueue_core.authoring.helpers import answer
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Delivery, Received, Settled
from tests.conformance.facade import FacadeSubscription


class _Reordering(FacadeSubscription):
    """A subscription that delivers tasks in the wrong order: it takes all, sorts them and releases the surplus."""

    @abstractmethod
    def rank(self, place: int, delivery: Delivery) -> Any:
        """Return the sort key of a delivery, given its position in the correct order."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await self.inner.receive(max(limit, 5000) if limit > 0 else limit, timeout)
        ranked = sorted(enumerate(received.deliveries), key=lambda pair: self.rank(*pair))
        chosen = [delivery for _, delivery in ranked]
        await self.inner.redeliver(*chosen[limit:])
        again = received.again or len(chosen) > limit
        return msgspec.structs.replace(received, deliveries=tuple(chosen[:limit]), again=again)


class Lifo(_Reordering):
    """Defect: within a priority, the newest task is delivered first."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return -delivery.task.priority, -place


class InvertedPriority(_Reordering):
    """Defect: the lowest priority is delivered first."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.priority, place


class ShuffledPriority(_Reordering):
    """Defect: for every priority except the default, the newest task is delivered first."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return not delivery.losses, place if delivery.task.priority == 5 else -place


class StarvesAKey(_Reordering):
    """Defect: queues are served in a fixed order: the second queue only when the first is empty."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.key, place


class ReturnedLast(_Reordering):
    """Defect: a released task goes to the end of the queue."""

    returned: set[str]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.returned = set()

    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.id in self.returned, place

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        self.returned |= {delivery.task.id for delivery in deliveries}
        return await super().redeliver(*deliveries, lost=lost)


class HandsOutTwice(FacadeSubscription):
    """Defect: a delivery of one consumer is also delivered to the next consumer."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        shown, self.facade.shown = self.facade.shown, received.deliveries
        room = limit - len(received.deliveries)
        deliveries = (*received.deliveries, *shown[:room])
        return msgspec.structs.replace(received, deliveries=deliveries)


class LosesOnCancel(FacadeSubscription):
    """Defect: a cancellation loses deliveries, because ``receive`` awaits between taking and returning them."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        await asyncio.sleep(0)
        return received


class LosesWakeUps(FacadeSubscription):
    """Defect: a receive without a timeout is never woken."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, 0)
        if received.deliveries or timeout == 0:
            return received
        return await super().receive(limit, timeout or await asyncio.Future())


class Unchecked(FacadeSubscription):
    """Defect: a receive with a limit of 0 or less is accepted instead of refused."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        return await super().receive(limit, timeout) if limit > 0 else Received()


class DropsOnRedeliver(FacadeSubscription):
    """Defect: releasing a task ends it."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        if lost:
            return await super().redeliver(*deliveries, lost=True)
        return await self.inner.ack(*deliveries)


class BurnsAnAttempt(FacadeSubscription):
    """Defect: releasing a task counts as a failed attempt."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        if lost:
            return await super().redeliver(*deliveries, lost=True)
        publisher = self.facade.inner.publisher
        for delivery in deliveries:
            await publisher.schedule_retry(delivery.task, self.facade.now(), settles=delivery)
        return (Settled.OK,) * len(deliveries)


class CountsHandBackAsLoss(FacadeSubscription):
    """Defect: a release is counted as a loss, and a loss as a release."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        return await super().redeliver(*deliveries, lost=not lost)


class AcceptsStaleReceipts(FacadeSubscription):
    """Defect: acking with a stale receipt is reported as successful."""

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        with suppress(LeaseLost):
            await super().ack(*deliveries, results=results)
        return (Settled.OK,) * len(deliveries)


class RefusesResends(FacadeSubscription):
    """Defect: a settlement that is sent again after a lost response is refused."""

    settled: set[str]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.settled = set()

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        outcomes = list(await super().ack(*deliveries, results=results))
        for index, delivery in enumerate(deliveries):
            if delivery.receipt in self.settled:
                outcomes[index] = Settled.LEASE_LOST
            self.settled.add(delivery.receipt)
        return answer(outcomes)


class CloseKeepsLeases(FacadeSubscription):
    """Defect: closing a subscription does not release its deliveries."""

    async def close(self) -> None:
        waiting = await self.inner.receive(1, 0) if not self.inner.closed else Received()
        await self.inner.redeliver(*waiting.deliveries)


class AdoptsForeignReceipts(FacadeSubscription):
    """Defect: a subscription can adopt the delivery of any other worker whose receipt it knows."""

    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        answers: list[Delivery | None] = [None] * len(receipts)
        for other in self.facade.subscriptions:
            for index, found in enumerate(await other.inner.adopt(*receipts)):
                answers[index] = answers[index] or found
        return tuple(answers)


class LosesForOthers(FacadeSubscription):
    """Defect: a subscription can report the delivery of any other worker as lost."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        owners = [one.inner for one in self.facade.subscriptions if lost]
        held = (one for one in owners if one.owned.keys() & {d.receipt for d in deliveries})
        return await next(held, self.inner).redeliver(*deliveries, lost=lost)


class NeverRevokes(FacadeSubscription):
    """Defect: a worker is never told that its task was cancelled."""

    async def revoked(self) -> tuple[str, ...]:
        while not self.inner.closed:
            await self.inner.revoked()
        return ()


class LosesResults(FacadeSubscription):
    """Defect: results of acks are accepted and not stored."""

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        return await super().ack(*deliveries, results=results[:0])
