"""The Redis backend, put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from taskqueue_core.authoring.helpers import checked_keys
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import Clock
from taskqueue_core.config import load_settings
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import Health
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.context import RedisContext
from taskqueue_redis.control import RedisControl, RedisDeadLetters
from taskqueue_redis.publisher import RedisPublisher
from taskqueue_redis.slots.pool import RedisSlots
from taskqueue_redis.subscription import RedisSubscription


class RedisBackend:
    """See `taskqueue_core.backend.Backend`. One event loop at a time."""

    capabilities = Capabilities(names=frozenset(Capability), shared=True, durable=True)

    def __init__(
        self, *, clock: Clock | None = None, settings: RedisSettings | None = None
    ) -> None:
        """Do no input or output. A ``clock`` in place of the store's time is for tests."""
        self._context = RedisContext(settings or load_settings(RedisSettings), clock)
        self.publisher = RedisPublisher(self._context)
        self.control = RedisControl(self._context)
        self.dead_letters = RedisDeadLetters(self._context)
        self.slots = RedisSlots(self._context)

    def subscribe(self, keys: Iterable[str], consumer: str) -> RedisSubscription:
        """See `taskqueue_core.backend.Backend.subscribe`."""
        check_name("consumer", consumer)
        subscription = RedisSubscription(self._context, checked_keys(keys), consumer)
        self._context.subscriptions[subscription] = None
        return subscription

    def now(self) -> float:
        """Return the store's time, as the last answer told it."""
        return self._context.wakeups.now()

    async def health(self) -> Health:
        """Ask the store."""
        return await self._context.health()

    async def aclose(self) -> None:
        """Hand everything back and close every connection; what the store holds stays.

        With the store away this is tried for about a second, after TASKQUEUE_REDIS_ANSWER_TIMEOUT where it has just
        begun to be silent. Then calls that wait for it end with `BackendUnavailable`, and what was held comes back
        when its lease is over.
        """
        if self._context.closed:
            return
        self._context.closed = True
        patience = asyncio.create_task(self._context.give_up())
        try:
            for subscription in tuple(self._context.subscriptions):
                # its deliveries come back when its lease is over
                with contextlib.suppress(TaskQueueError):
                    await subscription.close()
            await self.publisher.sent()
            await self._context.aclose()
        finally:
            patience.cancel()
            await asyncio.wait([patience])


def create_backend() -> RedisBackend:
    """Make a Redis backend by its settings."""
    return RedisBackend(settings=load_settings(RedisSettings))
