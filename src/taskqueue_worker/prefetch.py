"""Prefetching from a subscription: never more than a local worker can start soon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.tasks import Delivery, Received

_MAX_BATCH = 100
"""deliveries per receive: enough to make the round trip cheap, few enough to be shared between workers"""
_PREFETCH_SECONDS = 0.05
"""seconds within which prefetched tasks should start, at the present rate"""
_RATE_WINDOW_SECONDS = 0.005
"""minimum seconds over which the rate of ended tasks is measured"""
_RETURN_AFTER_SECONDS = 1.0
"""seconds after which prefetched tasks that did not start are released"""
_NOT_WAITING = -1


class Prefetcher:
    """Receives deliveries while tasks run. How many it prefetches depends on how fast slots become free."""

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
    ) -> None:
        """Hold up to ``capacity`` deliveries: the concurrency plus the largest prefetch.

        ``deliver`` takes deliveries to run, and ``refuse`` those that came too late. ``return_waiting`` releases those
        that were not started, and ``wait_for_room`` waits while too many outcomes are unsettled.
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
        self._loop = asyncio.get_running_loop()
        self._held = 0
        self._prefetch_target = 0
        self._ended = 0
        self._rate_since = self._loop.time()
        self._changed = asyncio.Event()
        self._wake_at = _NOT_WAITING
        self._receiving: asyncio.Task[Received] | None = None
        self._stopping = False

    def ended(self) -> None:
        """Note that a task has ended and left its slot."""
        self._ended += 1
        self.returned()

    def returned(self) -> None:
        """Note that a delivery was released without having been run."""
        self._held -= 1
        if self._held <= self._wake_at:
            self._changed.set()

    def resize(self, capacity: int) -> None:
        """Set how many deliveries to hold, from the next receive on; 0 ends a receive that is waiting."""
        self._capacity = capacity
        if not capacity and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        self._changed.set()

    def stop(self) -> None:
        """Receive no more. Nothing is lost."""
        self._stopping = True
        self.resize(0)

    async def run(self) -> None:
        """Run until stopped. Raises `SubscriptionClosed` if the backend closed the subscription."""
        while not self._stopping:
            if self._held > self._receive_threshold():
                await self._wait_for_slot()
                continue
            await self._wait_for_room()
            received = await self._outage.retry_until_available(self._receive)
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
        """Return how many deliveries to hold."""
        return min(self._capacity, self._concurrency + self._prefetch_target)

    def _receive_threshold(self) -> int:
        """Return the number of held deliveries at which another receive is worth its round trip.

        At that number a slot is empty, or half of the prefetched deliveries have started.
        """
        target = self._target()
        return max(
            min(self._concurrency, target) - 1, target - max(1, (self._prefetch_target + 1) // 2)
        )

    async def _wait_for_slot(self) -> None:
        has_prefetched = self._held > self._concurrency
        self._changed.clear()
        self._wake_at = self._receive_threshold()
        try:
            async with asyncio.timeout(_RETURN_AFTER_SECONDS if has_prefetched else None):
                await self._changed.wait()
        except TimeoutError:
            self._update_rate()
            if self._held - self._concurrency > self._prefetch_target:
                self._return_waiting()
        finally:
            self._wake_at = _NOT_WAITING

    def _update_rate(self) -> None:
        now = self._loop.time()
        elapsed = now - self._rate_since
        if elapsed >= _RATE_WINDOW_SECONDS:
            self._prefetch_target = min(
                self._max_prefetch, int(self._ended / elapsed * _PREFETCH_SECONDS)
            )
            self._rate_since, self._ended = now, 0

    async def _receive(self) -> Received:
        limit = min(self._target() - self._held, _MAX_BATCH)
        if limit <= 0:
            return Received()
        # In an outage a receive does not wait, so that its answer shows at once that the store is available again.
        call = self._subscription.receive(limit, 0 if self._outage.down else None)
        self._receiving = receiving = asyncio.ensure_future(call)
        try:
            return await receiving
        except asyncio.CancelledError:
            # Only a cancellation by `resize` ends here; any other is passed on.
            task = asyncio.current_task()
            if self._receiving is receiving or task is None or task.cancelling():
                raise
            return Received()
        finally:
            self._receiving = None
