"""From a subscription to the slots of a local worker: never more than can be run soon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OUTAGE_ERRORS, OutageRetry
from taskqueue_core.tasks import Delivery, Received

__all__ = ["Prefetcher"]

_BATCH = 100
"""deliveries of one receive: enough to make its round trip cheap, few enough to be shared out"""
_POLL_SECONDS = 0.05
"""seconds within which what is fetched ahead should start, going by how many tasks ended lately"""
_LATELY = 0.005
"""seconds over which ended tasks are counted, at least: below that, chance decides"""
_PATIENCE = 1.0
"""seconds after which what was fetched ahead and did not start goes back"""
_AWAKE = -1


class Prefetcher:
    """Fetches while tasks run. What it fetches ahead is bounded by how fast slots become free."""

    def __init__(
        self,
        subscription: Subscription,
        store: OutageRetry,
        concurrency: int,
        capacity: int,
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        refuse: Callable[[Sequence[Delivery]], None],
        return_waiting: Callable[[], None],
        room: Callable[[], Awaitable[None]],
    ) -> None:
        """``capacity`` is the concurrency and what may be fetched ahead at the most.

        ``deliver`` takes deliveries to be run and ``refuse`` those that came too late, ``return_waiting`` hands back
        those that were not started, and ``room`` waits while too many verdicts are on their way to the store.
        """
        self._subscription = subscription
        self._store = store
        self._concurrency = concurrency
        self._capacity = capacity
        self._ahead = capacity - concurrency
        self._deliver = deliver
        self._refuse = refuse
        self._return_waiting = return_waiting
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._held = 0
        self._ready_soon = 0
        self._ended = 0
        self._since = self._loop.time()
        self._news = asyncio.Event()
        self._wake_at = _AWAKE
        self._receiving: asyncio.Task[Received] | None = None
        self._cautious = False
        self._stopping = False

    def ended(self) -> None:
        """Note that a task has ended and left its slot."""
        self._ended += 1
        self.returned()

    def returned(self) -> None:
        """Note that a delivery has left its slot, or the line for one, without having been run."""
        self._held -= 1
        if self._held <= self._wake_at:
            self._news.set()

    def resize(self, capacity: int) -> None:
        """Hold so many at the most, beginning with the next receive; 0 ends one that waits."""
        self._capacity = capacity
        if not capacity and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        self._news.set()

    def stop(self) -> None:
        """Receive no more. Nothing is lost."""
        self._stopping = True
        self.resize(0)

    async def run(self) -> None:
        """Run until stopped. Raises `SubscriptionClosed` where the backend closed the subscription."""
        while not self._stopping:
            if self._held > self._enough():
                await self._rest()
                continue
            await self._room()
            received = await self._store.retry_until_available(self._receive)
            self._reckon()
            deliveries = received.deliveries
            if not deliveries:
                continue
            if not self._capacity:
                self._refuse(deliveries)
                continue
            self._held += len(deliveries)
            self._deliver(deliveries)

    def _target(self) -> int:
        """Return how many to hold."""
        return min(self._capacity, self._concurrency + self._ready_soon)

    def _enough(self) -> int:
        """Return up to how many must be held for another receive to be worth its round trip.

        That is where a slot is empty, or half of what is fetched ahead has started.
        """
        target = self._target()
        return max(min(self._concurrency, target) - 1, target - max(1, (self._ready_soon + 1) // 2))

    async def _rest(self) -> None:
        ahead = self._held > self._concurrency
        self._news.clear()
        self._wake_at = self._enough()
        try:
            async with asyncio.timeout(_PATIENCE if ahead else None):
                await self._news.wait()
        except TimeoutError:
            self._reckon()
            if self._held - self._concurrency > self._ready_soon:
                self._return_waiting()
        finally:
            self._wake_at = _AWAKE

    def _reckon(self) -> None:
        now = self._loop.time()
        elapsed = now - self._since
        if elapsed >= _LATELY:
            self._ready_soon = min(self._ahead, int(self._ended / elapsed * _POLL_SECONDS))
            self._since, self._ended = now, 0

    async def _receive(self) -> Received:
        limit = min(self._target() - self._held, _BATCH)
        if limit <= 0:
            return Received()
        # After an outage the first receive does not wait, so that its answer can tell that the store is back.
        cautious, self._cautious = self._cautious, False
        call = self._subscription.receive(limit, 0 if cautious else None)
        self._receiving = receiving = asyncio.ensure_future(call)
        try:
            return await receiving
        except asyncio.CancelledError:
            # Only our own interruption ends here; who else cancels means it.
            task = asyncio.current_task()
            if self._receiving is receiving or task is None or task.cancelling():
                raise
            return Received()
        except OUTAGE_ERRORS:
            self._cautious = True
            raise
        finally:
            self._receiving = None
