# ruff: noqa: D102 - each method stands for the one of the backend that it breaks
"""Backends whose subscriptions break one promise each, most of them as a real one did."""

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

# Delivering


class _Reordering(FacadeSubscription):
    """Takes everything, sorts it, keeps what was asked for and hands the rest back."""

    @abstractmethod
    def rank(self, place: int, delivery: Delivery) -> Any:
        """Return what to sort a delivery by."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await self.inner.receive(max(limit, 5000) if limit > 0 else limit, timeout)
        ranked = sorted(enumerate(received.deliveries), key=lambda pair: self.rank(*pair))
        chosen = [delivery for _, delivery in ranked]
        await self.inner.redeliver(*chosen[limit:])
        again = received.again or len(chosen) > limit
        return msgspec.structs.replace(received, deliveries=tuple(chosen[:limit]), again=again)


class Lifo(_Reordering):
    """The newest comes first."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return -delivery.task.priority, -place


class InvertedPriority(_Reordering):
    """The lowest priority comes first."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.priority, place


class ShuffledPriority(_Reordering):
    """Within other priorities than the usual one the newest comes first."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return not delivery.losses, place if delivery.task.priority == 5 else -place


class StarvesAKey(_Reordering):
    """Keys are served in a fixed order: the second one only when the first is empty."""

    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.key, place


class ReturnedLast(_Reordering):
    """A release goes to the end of the queue."""

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
    """What one consumer has, the next one gets too."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        shown, self.facade.shown = self.facade.shown, received.deliveries
        room = limit - len(received.deliveries)
        deliveries = (*received.deliveries, *shown[:room])
        return msgspec.structs.replace(received, deliveries=deliveries)


class LosesOnCancel(FacadeSubscription):
    """Between taking and answering there is an await, and nothing guards it."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        await asyncio.sleep(0)
        return received


class LosesWakeUps(FacadeSubscription):
    """A receive without a timeout sleeps through everything."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, 0)
        if received.deliveries or timeout == 0:
            return received
        return await super().receive(limit, timeout or await asyncio.Future())


class Unchecked(FacadeSubscription):
    """Receiving nothing is fine."""

    async def receive(self, limit: int, timeout: float | None) -> Received:
        return await super().receive(limit, timeout) if limit > 0 else Received()


# Settling


class DropsOnRedeliver(FacadeSubscription):
    """A release ends the task."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        if lost:
            return await super().redeliver(*deliveries, lost=True)
        return await self.inner.ack(*deliveries)


class BurnsAnAttempt(FacadeSubscription):
    """A release counts as a failure."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        if lost:
            return await super().redeliver(*deliveries, lost=True)
        publisher = self.facade.inner.publisher
        for delivery in deliveries:
            await publisher.schedule_retry(delivery.task, self.facade.now(), settles=delivery)
        return (Settled.OK,) * len(deliveries)


class CountsHandBackAsLoss(FacadeSubscription):
    """A release counts as a loss, and a loss as a release."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        return await super().redeliver(*deliveries, lost=not lost)


class AcceptsStaleReceipts(FacadeSubscription):
    """Every ack is ok."""

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        with suppress(LeaseLost):
            await super().ack(*deliveries, results=results)
        return (Settled.OK,) * len(deliveries)


class RefusesResends(FacadeSubscription):
    """A settlement whose response was lost is refused when it is sent again."""

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
    """A closed subscription keeps what it holds."""

    async def close(self) -> None:
        waiting = await self.inner.receive(1, 0) if not self.inner.closed else Received()
        await self.inner.redeliver(*waiting.deliveries)


class AdoptsForeignReceipts(FacadeSubscription):
    """Whoever knows a receipt may take it over."""

    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        answers: list[Delivery | None] = [None] * len(receipts)
        for other in self.facade.subscriptions:
            for index, found in enumerate(await other.inner.adopt(*receipts)):
                answers[index] = answers[index] or found
        return tuple(answers)


class LosesForOthers(FacadeSubscription):
    """Whoever knows a receipt may declare it lost."""

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        owners = [one.inner for one in self.facade.subscriptions if lost]
        held = (one for one in owners if one.owned.keys() & {d.receipt for d in deliveries})
        return await next(held, self.inner).redeliver(*deliveries, lost=lost)


class NeverRevokes(FacadeSubscription):
    """Nobody learns that a task was cancelled."""

    async def revoked(self) -> tuple[str, ...]:
        while not self.inner.closed:
            await self.inner.revoked()
        return ()


class LosesResults(FacadeSubscription):
    """Results are taken and not kept."""

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        return await super().ack(*deliveries, results=results[:0])
