"""Receiving for a local worker, with no more deliveries in advance than the worker can start soon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Received

_MAX_BATCH = 100
"""maximum number of deliveries per receive, so that several workers get a share of the waiting tasks"""
_PREFETCH_SECONDS = 0.05
"""seconds within which prefetched tasks should start, at the current rate"""
_RATE_WINDOW_SECONDS = 0.005
"""minimum number of seconds over which the rate of ended tasks is measured"""
_RETURN_AFTER_SECONDS = 1.0
"""seconds without a receive after which waiting tasks are released, if there are too many for the current rate"""
_NOT_WAITING = -1


class Receiver(Protocol):
    """The part of a local worker that receives deliveries, as many as the worker can hold."""

    def ended(self) -> None:
        """Record that a task has ended, so that its slot is free."""

    def returned(self) -> None:
        """Record that a delivery was released, which frees its place but does not count towards the rate."""

    def resize(self, capacity: int) -> None:
        """Set the maximum number of deliveries to hold, from the next receive on; 0 also ends a waiting receive."""

    def lend(self, count: int) -> None:
        """Set the number of deliveries to hold beyond the capacity, because their handlers wait for other tasks."""

    def stop(self) -> None:
        """Receive no more deliveries. Deliveries that a running receive still returns are released."""

    async def run(self) -> None:
        """Receive until `stop` is called. Raises `SubscriptionClosed` if the backend closed the subscription."""


class Prefetcher:
    """The receiver of a local worker. The faster the tasks end, the more deliveries it receives in advance."""

    def __init__(
        self,
        subscription: Subscription,
        outage: OutageRetry,
        concurrency: int,
        capacity: int,
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        refuse: Callable[[Sequence[Delivery]], None],
        return_waiting: Callable[[], None],
        wait_for_room: Callable[[], Awaitable[None]],
        on_answer: Callable[[], None],
    ) -> None:
        """Create a receiver that holds up to ``capacity`` deliveries: the concurrency plus the maximum prefetch.

        ``deliver`` is called with deliveries to run, and ``refuse`` with deliveries received after the capacity became
        0. ``return_waiting`` releases the deliveries that have not been started. ``wait_for_room`` waits while too many
        outcomes are not yet confirmed by the store. ``on_answer`` is called at the first answer of the store; the first
        receive does not wait for tasks, so that this is soon.
        """
        self._subscription = subscription
        self._outage = outage
        self._concurrency = concurrency
        self._capacity = capacity
        self._max_prefetch = capacity - concurrency
        self._deliver = deliver
        self._refuse = refuse
        self._return_waiting = return_waiting
        self._wait_for_room = wait_for_room
        self._on_answer = on_answer
        self._answered = False
        self._loop = asyncio.get_running_loop()
        self._held = 0
        self._lent = 0
        self._prefetch_target = 0
        self._ended = 0
        self._rate_since = self._loop.time()
        self._changed = asyncio.Event()
        self._wake_at = _NOT_WAITING
        self._receiving: asyncio.Task[Received] | None = None
        self._stopping = False

    def ended(self) -> None:
        self._ended += 1
        self.returned()

    def returned(self) -> None:
        self._held -= 1
        if self._held <= self._wake_at:
            self._changed.set()

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        if not capacity and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        self._changed.set()

    def lend(self, count: int) -> None:
        self._lent = count
        self._changed.set()

    def stop(self) -> None:
        self._stopping = True
        self.resize(0)

    async def run(self) -> None:
        while not self._stopping:
            if self._held > self._receive_threshold():
                await self._wait_for_slot()
                continue
            await self._wait_for_room()
            received = await self._outage.retry_until_available(self._receive)
            if not self._answered:
                self._answered = True
                self._on_answer()
            self._update_rate()
            deliveries = received.deliveries
            if not deliveries:
                continue
            if not self._capacity:
                self._refuse(deliveries)
                continue
            self._held += len(deliveries)
            self._deliver(deliveries)

    def _target(self) -> int:
        """Return the number of deliveries to hold at the current rate."""
        target = min(self._capacity, self._concurrency + self._prefetch_target)
        return target and min(target + self._lent, LIMITS.credit)

    def _receive_threshold(self) -> int:
        """Return the number of held deliveries at or below which the next receive starts.

        At this number, a slot is free or half of the prefetched deliveries have started.
        """
        target = self._target()
        half = max(1, (self._prefetch_target + 1) // 2)
        return max(min(self._concurrency + self._lent, target) - 1, target - half)

    async def _wait_for_slot(self) -> None:
        has_prefetched = self._held > self._concurrency + self._lent
        self._changed.clear()
        self._wake_at = self._receive_threshold()
        try:
            async with asyncio.timeout(_RETURN_AFTER_SECONDS if has_prefetched else None):
                await self._changed.wait()
        except TimeoutError:
            self._update_rate()
            if self._held - self._concurrency - self._lent > self._prefetch_target:
                self._return_waiting()
        finally:
            self._wake_at = _NOT_WAITING

    def _update_rate(self) -> None:
        now = self._loop.time()
        elapsed = now - self._rate_since
        if elapsed >= _RATE_WINDOW_SECONDS:
            startable = int(self._ended / elapsed * _PREFETCH_SECONDS)
            self._prefetch_target = min(self._max_prefetch, startable)
            self._rate_since, self._ended = now, 0

    async def _receive(self) -> Received:
        limit = min(self._target() - self._held, _MAX_BATCH)
        if limit <= 0:
            return Received()
        # Until the first answer, and during an outage, receive without waiting: the answer shows that the store is
        # available.
        at_once = self._outage.down or not self._answered
        call = self._subscription.receive(limit, 0 if at_once else None)
        self._receiving = receiving = asyncio.ensure_future(call)
        try:
            return await receiving
        except asyncio.CancelledError:
            # A cancellation by `resize` ends only this receive; any other cancellation is raised again.
            task = asyncio.current_task()
            if self._receiving is receiving or task is None or task.cancelling():
                raise
            return Received()
        finally:
            self._receiving = None
