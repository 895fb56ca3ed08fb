"""Backends whose subscriptions break one promise each, most of them as a real one did."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from taskqueue_core.authoring import answer
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import (
    Delivery,
    Received,
    Settled,
)
from tests.conformance.facade import (
    Facade,
    FacadeSubscription,
)

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


class _LifoSubscription(_Reordering):
    def rank(self, place: int, delivery: Delivery) -> Any:
        return -delivery.task.priority, -place


class Lifo(Facade):
    """The newest comes first."""

    subscription_type = _LifoSubscription


class _InvertedSubscription(_Reordering):
    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.priority, place


class InvertedPriority(Facade):
    """The lowest priority comes first."""

    subscription_type = _InvertedSubscription


class _FlatSubscription(_Reordering):
    def rank(self, place: int, delivery: Delivery) -> Any:
        return not delivery.losses, place if delivery.task.priority == 5 else -place


class ShuffledPriority(Facade):
    """Within other priorities than the usual one the newest comes first."""

    subscription_type = _FlatSubscription


class _FixedOrderSubscription(_Reordering):
    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.key, place


class StarvesAKey(Facade):
    """Keys are served in a fixed order: the second one only when the first is empty."""

    subscription_type = _FixedOrderSubscription


class _ReturnedLastSubscription(_Reordering):
    returned: set[str]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.returned = set()

    def rank(self, place: int, delivery: Delivery) -> Any:
        return delivery.task.id in self.returned, place

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        self.returned |= {delivery.task.id for delivery in deliveries}
        return await super().redeliver(*deliveries, lost=lost)


class ReturnedLast(Facade):
    """A hand-back goes to the end of the queue."""

    subscription_type = _ReturnedLastSubscription


class _HandsOutTwiceSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        shown, self.facade.shown = self.facade.shown, received.deliveries
        room = limit - len(received.deliveries)
        deliveries = (*received.deliveries, *shown[:room])
        return msgspec.structs.replace(received, deliveries=deliveries)


class HandsOutTwice(Facade):
    """What one consumer has, the next one gets too."""

    subscription_type = _HandsOutTwiceSubscription


class _LosingSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, timeout)
        await asyncio.sleep(0)
        return received


class LosesOnCancel(Facade):
    """Between taking and answering there is an await, and nothing guards it."""

    subscription_type = _LosingSubscription


class _DeafSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        received = await super().receive(limit, 0)
        if received.deliveries or timeout == 0:
            return received
        return await super().receive(limit, timeout or await asyncio.Future())


class LosesWakeUps(Facade):
    """A receive without a timeout sleeps through everything."""

    subscription_type = _DeafSubscription


class _UncheckedSubscription(FacadeSubscription):
    async def receive(self, limit: int, timeout: float | None) -> Received:
        return await super().receive(limit, timeout) if limit > 0 else Received()


class Unchecked(Facade):
    """Receiving nothing is fine."""

    subscription_type = _UncheckedSubscription


# Settling


class _DropsSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        if lost:
            return await super().redeliver(*deliveries, lost=True)
        return await self.inner.ack(*deliveries)


class DropsOnRedeliver(Facade):
    """A hand-back ends the task."""

    subscription_type = _DropsSubscription


class _BurnsSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        if lost:
            return await super().redeliver(*deliveries, lost=True)
        publisher = self.facade.inner.publisher
        for delivery in deliveries:
            await publisher.schedule_retry(delivery.task, self.facade.now(), settles=delivery)
        return (Settled.OK,) * len(deliveries)


class BurnsAnAttempt(Facade):
    """A hand-back counts as a failure."""

    subscription_type = _BurnsSubscription


class _ConfusingSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        return await super().redeliver(*deliveries, lost=not lost)


class CountsHandBackAsLoss(Facade):
    """A hand-back counts as a loss, and a loss as a hand-back."""

    subscription_type = _ConfusingSubscription


class _LenientSubscription(FacadeSubscription):
    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        with suppress(LeaseLost):
            await super().ack(*deliveries, results=results)
        return (Settled.OK,) * len(deliveries)


class AcceptsStaleReceipts(Facade):
    """Every ack is ok."""

    subscription_type = _LenientSubscription


class _ForgetfulSubscription(FacadeSubscription):
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


class RefusesResends(Facade):
    """A settlement whose answer was lost is refused when it is sent again."""

    subscription_type = _ForgetfulSubscription


class _KeepsSubscription(FacadeSubscription):
    async def close(self) -> None:
        waiting = await self.inner.receive(1, 0) if not self.inner.closed else Received()
        await self.inner.redeliver(*waiting.deliveries)


class CloseKeepsLeases(Facade):
    """A closed subscription keeps what it holds."""

    subscription_type = _KeepsSubscription


class _ThiefSubscription(FacadeSubscription):
    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        answers: list[Delivery | None] = [None] * len(receipts)
        for other in self.facade.subscriptions:
            for index, found in enumerate(await other.inner.adopt(*receipts)):
                answers[index] = answers[index] or found
        return tuple(answers)


class AdoptsForeignReceipts(Facade):
    """Whoever knows a receipt may take it over."""

    subscription_type = _ThiefSubscription


class _TattlingSubscription(FacadeSubscription):
    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        owners = [one.inner for one in self.facade.subscriptions if lost]
        held = (one for one in owners if one.owned.keys() & {d.receipt for d in deliveries})
        return await next(held, self.inner).redeliver(*deliveries, lost=lost)


class LosesForOthers(Facade):
    """Whoever knows a receipt may declare it lost."""

    subscription_type = _TattlingSubscription


class _SilentSubscription(FacadeSubscription):
    async def revoked(self) -> tuple[str, ...]:
        while not self.inner.closed:
            await self.inner.revoked()
        return ()


class NeverRevokes(Facade):
    """Nobody learns that a task was cancelled."""

    subscription_type = _SilentSubscription


class _ResultlessSubscription(FacadeSubscription):
    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        return await super().ack(*deliveries, results=results[:0])


class LosesResults(Facade):
    """Results are taken and not kept."""

    subscription_type = _ResultlessSubscription
