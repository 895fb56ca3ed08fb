"""A composite subscription: receives from several members, and settles each delivery at the member that issued it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from taskqueue_core.authoring.helpers import answer, check_size, checked_results
from taskqueue_core.composite.backend import CompositeBackend
from taskqueue_core.composite.receiver import MultiReceiver
from taskqueue_core.composite.source import Source
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable, LeaseLost, SubscriptionClosed, TaskQueueError
from taskqueue_core.tasks import Delivery, Settled

_PAUSE = 1.0


class JointSubscription(MultiReceiver):
    """Implementation of `Subscription`, and of its optional capabilities, for a composite backend."""

    def __init__(self, composite: CompositeBackend, keys: tuple[str, ...], consumer: str) -> None:
        self._revoked: list[str] = []
        self._news = asyncio.Event()
        self._watchers: dict[Source, asyncio.Task[None]] = {}
        self._watching = False
        super().__init__(composite, keys, consumer)
        composite.remember(self)

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        checked = checked_results(deliveries, results)
        return await self._settle(
            deliveries,
            lambda subscription, batch, indexes: subscription.ack(
                *batch, results=[checked[index] for index in indexes]
            ),
        )

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        check_size("deliveries", deliveries)
        return await self._settle(
            deliveries, lambda subscription, batch, _: subscription.redeliver(*batch, lost=lost)
        )

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        error: str | None = None,
        traceback: str | None = None,
    ) -> Settled:
        async def call(subscription: Any, batch: list[Delivery], _: list[int]) -> list[Settled]:
            return [await subscription.dead_letter(batch[0], reason, error, traceback)]

        return (await self._settle([delivery], call))[0]

    async def _settle(
        self,
        deliveries: Sequence[Delivery],
        call: Callable[[Any, list[Delivery], list[int]], Awaitable[Sequence[Settled]]],
    ) -> tuple[Settled, ...]:
        """Settle deliveries with one call per source. If one source is unavailable, the others are still called."""
        groups: dict[Source, list[int]] = {}
        inner: list[Delivery] = []
        for index, delivery in enumerate(deliveries):
            number, result = self._composite.to_member(delivery)
            inner.append(result)
            source = self._source_of(number, result.task.key, result.receipt)
            groups.setdefault(source, []).append(index)

        outcomes = [Settled.LEASE_LOST] * len(deliveries)

        async def settle(source: Source, indexes: list[int]) -> None:
            batch = [inner[index] for index in indexes]
            with contextlib.suppress(LeaseLost):
                settled = await call(source.subscription, batch, indexes)
                for index, outcome in zip(indexes, settled, strict=True):
                    outcomes[index] = outcome
            for delivery in batch:
                source.out.pop(delivery.receipt, None)

        if len(groups) == 1:
            await settle(*groups.popitem())
        else:
            await gather_all(settle(source, indexes) for source, indexes in groups.items())
        return answer(outcomes)

    def _source_of(self, number: int, key: str, receipt: str) -> Source:
        """Return a receipt's source. If that source is gone, prefer a source of its member that covers ``key``."""
        of_member = [source for source in self.sources if source.number == number]
        for source in of_member:
            if receipt in source.out:
                return source
        if of_member:
            return max(of_member, key=lambda source: key in source.keys)
        source = self.open(number, (key or self.keys[0],))
        source.retired = True  # it settles and adopts, but never receives
        return source

    def _allows(self, allowed: Callable[[str], bool], number: int, key: str) -> bool:
        return allowed(self._composite.public_name(number, key))

    async def adopt(
        self, *receipts: str, allowed: Callable[[str], bool] = bool
    ) -> tuple[Delivery | None, ...]:
        check_size("receipts", receipts)
        if self.closed:
            raise SubscriptionClosed("the subscription is closed")
        answers: list[Delivery | None] = [None] * len(receipts)
        requested = [list(self._composite.origins(receipt, "")) for receipt in receipts]
        while any(requested):
            groups: dict[Source, list[tuple[int, str]]] = {}
            for index, origins in enumerate(requested):
                if origins:
                    part, name = origins.pop(0)
                    source = self._source_of(part.member, part.key, name)
                    groups.setdefault(source, []).append((index, name))
            for source, group in groups.items():
                subscription: Any = source.subscription
                nothing: tuple[Delivery | None, ...] = (None,) * len(group)
                call = partial(
                    subscription.adopt,
                    *(name for _, name in group),
                    allowed=partial(self._allows, allowed, source.number),
                )
                result = await self._composite.at_leisure(source.member, call, nothing)
                for (index, name), delivery in zip(group, result, strict=True):
                    if delivery is not None:
                        source.out[name] = receipts[index]
                        answers[index] = self._composite.adopted(
                            source.number, receipts[index], delivery
                        )
                        requested[index] = []
        return tuple(answers)

    async def revoked(self) -> tuple[str, ...]:
        self._watching = True
        for source in self.sources:
            self._watch(source)
        await self._news.wait()
        receipts, self._revoked = tuple(self._revoked), []
        if not self.closed:
            self._news.clear()
        return receipts

    def open(self, number: int, keys: tuple[str, ...]) -> Source:
        source = super().open(number, keys)
        if self._watching:
            self._watch(source)
        return source

    def _watch(self, source: Source) -> None:
        if source not in self._watchers and not self.closed:
            self._watchers[source] = asyncio.create_task(self._forward_revocations(source))

    async def _forward_revocations(self, source: Source) -> None:
        subscription: Any = source.subscription
        with contextlib.suppress(TaskQueueError):
            while True:
                try:
                    receipts = await subscription.revoked()
                except BackendUnavailable:
                    await asyncio.sleep(_PAUSE)
                    continue
                if not receipts:  # the source's subscription was closed
                    return
                self._revoked += [source.out.pop(receipt, receipt) for receipt in receipts]
                self._news.set()

    async def close(self) -> None:
        self.closed = True
        if self._grace is not None:
            self._grace.cancel()
        for source in self.sources:
            source.give_up_waiting()
        try:
            await gather_all(
                self._composite.at_leisure(source.member, source.subscription.close, None)
                for source in self.sources
            )
        finally:
            self._news.set()
            for watcher in self._watchers.values():
                watcher.cancel()
