"""Subscriptions of the memory backend: receiving, settling, and waking a receive that waits."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence

from taskqueue_core.authoring.helpers import (
    SubscriptionBase,
    answer,
    check_size,
    checked_limit,
    checked_results,
)
from taskqueue_core.errors import SubscriptionClosed
from taskqueue_core.tasks import Delivery, Expired, Received, Settled
from taskqueue_memory.records import QueueState, TaskRecord
from taskqueue_memory.transitions import MemoryStore


class MemorySubscription(SubscriptionBase):
    """A consumer's subscription. It owns its deliveries until they are settled, adopted or released."""

    def __init__(self, store: MemoryStore, keys: tuple[str, ...], consumer: str) -> None:
        self.consumer = consumer
        self.keys = keys
        self.since = store.clock.now()
        self.owned: dict[str, TaskRecord] = {}
        self.ready: dict[QueueState, None] = {}
        """queues that may have work, in the order in which they are served"""
        self._store = store
        self.closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._looked_at = self.since
        """time of the last check for work; a timer is needed for each limit that allows a delivery only later"""
        self._revoked: list[str] = []
        self._revocation = asyncio.Event()
        self._secret = secrets.token_urlsafe(16)
        self._numbers = itertools.count()
        self._queues = tuple(store.queue(key) for key in keys)
        for queue in self._queues:
            queue.subscribers[self] = None
            self.ready[queue] = None

    async def receive(self, limit: int, timeout: float | None) -> Received:
        checked_limit(limit)
        if self.closed:
            raise SubscriptionClosed("the subscription is closed")
        clock = self._store.clock
        end = None if timeout is None else clock.now() + timeout
        waited = False
        while True:
            received = self._take(limit)
            over = end is not None and end <= clock.now()
            if received.deliveries or received.expired or over or self.closed:
                if waited:
                    self._pass_on()
                return received
            await self._wait(end)
            waited = True

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        checked = checked_results(deliveries, results)
        pairs = zip(deliveries, checked, strict=True)
        return answer([self._store.ack(delivery, result) for delivery, result in pairs])

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        check_size("deliveries", deliveries)
        owner = self if lost else None
        return answer(self._store.redeliver(delivery, owner) for delivery in deliveries)

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        error: str | None = None,
        traceback: str | None = None,
    ) -> Settled:
        return answer([self._store.dead_letter(delivery, reason, error, traceback)])[0]

    async def adopt(
        self, *receipts: str, allowed: Callable[[str], bool] = bool
    ) -> tuple[Delivery | None, ...]:
        check_size("receipts", receipts)
        if self.closed:
            raise SubscriptionClosed("the subscription is closed")
        return tuple(self._store.adopt(self, receipt, allowed) for receipt in receipts)

    async def revoked(self) -> tuple[str, ...]:
        await self._revocation.wait()
        receipts, self._revoked = tuple(self._revoked), []
        if not self.closed:
            self._revocation.clear()
        return receipts

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for queue in self._queues:
            del queue.subscribers[self]
            queue.waiting.pop(
                self, None
            )  # otherwise this subscription would be woken for the deliveries that it releases
        for record in tuple(self.owned.values()):
            self._store.hand_back(record, lost=False)
        self._store.leave(self._queues)
        self.wake()
        self._revocation.set()

    @property
    def in_flight(self) -> int:
        return len(self.owned)

    def new_receipt(self) -> str:
        return f"{self._secret}.{next(self._numbers)}"

    def wake(self) -> bool:
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True

    def revoke(self, receipt: str) -> None:
        self._revoked.append(receipt)
        self._revocation.set()

    def _take(self, limit: int) -> Received:
        if self.closed:
            return Received()
        self._store.catch_up()
        now = self._looked_at = self._store.clock.now()
        deliveries: list[Delivery] = []
        expired: list[Expired] = []
        held: dict[QueueState, None] = {}
        remaining: dict[QueueState, int] = {}
        while self.ready and len(deliveries) < limit:
            queue = next(iter(self.ready))
            if queue.limited and not _has_room(queue, remaining, now):
                del self.ready[queue]
                if queue.available:
                    held[queue] = None
                continue
            delivery = self._store.take(self, queue, now, expired)
            if not queue.available:
                del self.ready[queue]
            elif len(self.ready) > 1:  # put the queue at the end, so that queues take turns
                del self.ready[queue]
                self.ready[queue] = None
            if delivery is not None:
                deliveries.append(delivery)
                if queue in remaining:
                    remaining[queue] -= 1
            elif queue in self.ready:
                break  # this call has reached the maximum number of expired tasks
        again = bool(self.ready) and any(
            queue.available and queue.room(now).left for queue in self.ready
        )
        self.ready |= held
        return Received(
            deliveries=tuple(deliveries),
            again=again,
            due_at=None if deliveries else self._due_at(),
            expired=tuple(expired),
        )

    def _time_out(self) -> None:
        self.wake()

    def _due_at(self) -> float | None:
        now = self._looked_at
        dues = [queue.scheduled.next_at() for queue in self._queues]
        dues += [queue.flights.next_at() for queue in self._queues]
        return _first([*dues, *(queue.room(now).opens_at for queue in self.ready)])

    def _alarm_at(self) -> float | None:
        """Return the next time at which a limit allows a delivery, unless another subscription has a timer for it."""
        # Use the time of the last check. With the current time, `room` would return no time for a limit that has begun
        # to allow deliveries since then, and no timer would be set.
        now, first = self._looked_at, None
        for queue in self.ready:
            opens_at = queue.room(now).opens_at
            if opens_at is None or (queue.alarm is not None and queue.alarm_at <= opens_at):
                continue
            queue.alarm, queue.alarm_at, first = self, opens_at, _first([first, opens_at])
        return first

    async def _wait(self, end: float | None) -> None:
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        alarm = _first([end, self._alarm_at()])
        timer = None if alarm is None else self._store.clock.call_at(alarm, self._time_out)
        self._store.timers.follow()
        for queue in self._queues:
            queue.waiting[self] = None
        try:
            await waiter
        except asyncio.CancelledError:
            self._pass_on()
            raise
        finally:
            if self._waiter is waiter:
                self._waiter = None
                for queue in self._queues:
                    queue.waiting.pop(self, None)
                    if queue.alarm is self:
                        queue.alarm = None
            if timer is not None:
                timer.cancel()

    def _pass_on(self) -> None:
        """Wake other subscriptions for any work that is left: this subscription may have been woken for that work."""
        for queue in self.ready:
            self._store.notify(queue, queue.available)


def _has_room(queue: QueueState, remaining: dict[QueueState, int], now: float) -> bool:
    """Return whether a queue may deliver an entry. ``remaining``: the number of deliveries that limits still allow."""
    if queue not in remaining:
        remaining[queue] = queue.room(now).left
    return remaining[queue] > 0 and queue.ready > 0


def _first(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)
