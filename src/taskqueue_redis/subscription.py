"""Subscriptions of the Redis backend: registering, receiving and settling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from taskqueue_core.authoring.helpers import (
    SubscriptionBase,
    answer,
    check_size,
    checked_limit,
    checked_results,
)
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable, SubscriptionClosed, TaskQueueError
from taskqueue_core.tasks import Delivery, Received, Settled
from taskqueue_redis.context import RedisContext
from taskqueue_redis.receiver import ConsumerExpired, Receiver
from taskqueue_redis.scripts.receipts import IssuedReceipt, parse_receipt
from taskqueue_redis.scripts.runner import microseconds, seconds
from taskqueue_redis.scripts.task_codec import delivery_of

_RELEASED_AT_ONCE = 200
_RETRY_SECONDS = 1.0
"""seconds between attempts to register again"""
_CHECKS = 100
"""maximum number of consecutive reads that return nothing although the store reports more work"""


class RedisSubscription(SubscriptionBase):
    """A consumer's subscription.

    It registers at the first call of `receive`, `adopt` or `revoked`, or when workers or statistics are requested. It
    keeps its deliveries by sending heartbeats.
    """

    def __init__(self, context: RedisContext, keys: tuple[str, ...], consumer: str) -> None:
        self.keys = keys
        self.consumer = consumer
        self.token = context.new_token()
        self.since = context.clock.now()
        self._closing = asyncio.Event()
        self.asleep = False
        self._context = context
        self._partitions = context.scripts.partitions.group(keys)
        self._joined: set[str] = set()
        self._joining = asyncio.Lock()
        self._entering = {partition: asyncio.Lock() for partition in self._partitions}
        self._listening = False
        self._receiver = Receiver(context, self)
        self._woken = asyncio.Event()
        self._woken_by: set[str] = set()
        self._revoked: list[str] = []
        self._revocation = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    async def receive(self, limit: int, timeout: float | None) -> Received:
        checked_limit(limit)
        if self._closing.is_set():
            raise SubscriptionClosed("the subscription is closed")
        self._context.ensure_open()
        end = None if timeout is None else self._context.clock.local.now() + timeout
        try:
            return await self._receive(limit, end)
        except BackendUnavailable:
            if self._closing.is_set():
                return Received()
            raise
        finally:
            self.asleep = False
            for key in self._woken_by & self._receiver.ready.keys():
                self._context.wakeups.notify(key)
            self._woken_by.clear()

    async def _receive(self, limit: int, end: float | None) -> Received:
        looked = 0
        while not self._closing.is_set():
            if len(self._joined) < len(self._partitions):
                await self._arrive()
            self.asleep = True  # set before the store is read, so that no notification is missed
            self._woken.clear()
            if self._closing.is_set():
                break
            token = self.token
            try:
                received = await self._receiver.take(limit)
            except ConsumerExpired:
                self._restart(token)
                continue
            if self._closing.is_set():
                break
            if received.deliveries or received.expired:
                return received
            if end is not None and end <= self._context.clock.local.now():
                return received
            if received.again and looked < _CHECKS:
                looked += 1  # this read found nothing, but the store may have more entries
                continue
            looked = 0
            await self._wait(end)
        return Received()

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        checked = checked_results(deliveries, results)
        self._context.ensure_open()
        return answer(await self._context.settlement.ack(deliveries, checked))

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        check_size("deliveries", deliveries)
        self._context.ensure_open()
        loser = self.token if lost else ""
        return answer(await self._context.settlement.redeliver(deliveries, loser))

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        error: str | None = None,
        traceback: str | None = None,
    ) -> Settled:
        self._context.ensure_open()
        settlement = self._context.settlement
        return answer([await settlement.dead_letter(delivery, reason, error, traceback)])[0]

    async def adopt(
        self, *receipts: str, allowed: Callable[[str], bool] = bool
    ) -> tuple[Delivery | None, ...]:
        check_size("receipts", receipts)
        if self._closing.is_set():
            raise SubscriptionClosed("the subscription is closed")
        self._context.ensure_open()
        await self.join()
        answers: list[Delivery | None] = [None] * len(receipts)
        by_partition: dict[str, list[tuple[int, IssuedReceipt]]] = {}
        for index, text in enumerate(receipts):
            if (receipt := parse_receipt(text)) is not None and allowed(receipt.key):
                partition = self._context.scripts.partitions.of(receipt.key)
                if partition in self._joined:
                    by_partition.setdefault(partition, []).append((index, receipt))
        for partition, wanted in by_partition.items():
            items = [(r.key, r.lane, r.fence, r.token) for _, r in wanted]
            reply = await self._context.scripts.run_each("adopt", partition, (self.token,), items)
            for (index, receipt), result in zip(wanted, reply, strict=True):
                if result:
                    *entry, at, timeout, inputs = result
                    text, priority = receipts[index], int(receipt.lane[1])
                    answers[index] = delivery_of(
                        receipt.key,
                        priority,
                        text,
                        seconds(at),
                        entry,
                        timeout=timeout,
                        inputs=inputs,
                    )
                    self._context.receipts.add(text, self)
        return tuple(answers)

    async def revoked(self) -> tuple[str, ...]:
        if not self._closing.is_set():
            await self.join()
        await self._revocation.wait()
        receipts, self._revoked = tuple(self._revoked), []
        if not self._closing.is_set():
            self._revocation.clear()
        return receipts

    def revoke(self, receipts: Iterable[str]) -> None:
        self._revoked += receipts
        if self._revoked:
            self._revocation.set()

    async def join(self) -> None:
        if len(self._joined) == len(self._partitions) or self._closing.is_set():
            return
        async with self._joining:
            await self._context.scripts.check_promises()
            if not self._listening:
                await self._context.wakeups.listen(self)
                self._listening = True
        await gather_all(self.enter(partition) for partition in self._partitions)

    async def _arrive(self) -> None:
        """Register with all partitions. If some registrations have succeeded, leave the rest to background tasks."""
        missing = self._partitions.keys() - self._joined
        if missing and self._joined and not self._closing.is_set():
            for partition in missing:
                self._receiver.set_aside(partition)
        else:
            await self.join()

    async def enter(self, partition: str) -> None:
        if partition in self._joined:
            return
        async with self._entering[partition]:
            if partition in self._joined or self._closing.is_set():
                return
            token = self.token
            now = await self._context.scripts.run(
                "join", partition, token, self.consumer, microseconds(self.since),
                *self._partitions[partition],
            )  # fmt: skip
            self._context.clock.learn(partition, now)
            if token == self.token:  # otherwise `_restart` has changed the token in the meantime
                self._joined.add(partition)
                self._context.heartbeat.add(self, partition)

    async def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._context.wakeups.subscriptions.pop(self, None)
            self._context.heartbeat.remove(self.token)
            if self._listening:
                self._context.wakeups.leave(self)
            self.wake(None)
            self._revocation.set()
            self._context.receipts.drop(self)
            self._receiver.forget()
            await self._context.settlement.settled()
        await gather_all(self._leave(partition) for partition in self._partitions)

    async def _leave(self, partition: str) -> None:
        async with self._entering[partition]:
            if partition not in self._joined:
                return
            while not await self._context.scripts.run(
                "leave", partition, self.token, _RELEASED_AT_ONCE
            ):
                pass
            self._joined.discard(partition)

    def mark_uncertain(self) -> None:
        if self._joined:
            self._receiver.mark_all_uncertain()

    def wake(self, key: str | None) -> None:
        self.asleep = False
        if key is not None:
            self._receiver.ready.setdefault(key)
            self._woken_by.add(key)
        self._woken.set()

    async def _wait(self, end: float | None) -> None:
        timer = None if end is None else self._context.clock.local.call_at(end, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def expire(self, token: str) -> None:
        if token == self.token and not self._closing.is_set():
            self._restart(token)
            self.wake(None)  # a receive in progress registers first, so that it raises `QueueReset`
            self._context.background.start(self._join_again())

    async def _join_again(self) -> None:
        while len(self._joined) < len(self._partitions) and not self._closing.is_set():
            try:
                await self.join()
            except TaskQueueError:
                await asyncio.sleep(_RETRY_SECONDS)

    def _restart(self, token: str) -> None:
        """Continue as a new consumer: the lease of the one with ``token`` has expired; others have its deliveries."""
        if token != self.token:
            return  # done already
        self._context.heartbeat.remove(self.token)
        self.revoke(self._context.receipts.drop(self))
        self._receiver.forget()
        self._joined.clear()
        self.token = self._context.new_token()
