"""The Redis backend. It creates its parts, and closes them in the right order."""

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
from taskqueue_redis.audit import RedisAudit
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.context import RedisContext
from taskqueue_redis.control import RedisControl
from taskqueue_redis.dead_letters import RedisDeadLetters
from taskqueue_redis.dependencies import RedisDependencies
from taskqueue_redis.listing import RedisListing
from taskqueue_redis.publisher import RedisPublisher
from taskqueue_redis.schedules import RedisSchedules
from taskqueue_redis.slots.pool import RedisSlots
from taskqueue_redis.streams import RedisStreams
from taskqueue_redis.subscription import RedisSubscription

_HEALTH_SECONDS = 3.0
"""seconds that a health check allows for a write in every partition; after that, the store counts as unavailable"""
_OUTAGE_SECONDS = 1.0
"""seconds for which `aclose` waits for a store that is unavailable"""


class RedisBackend:
    """Backend on Redis or Valkey. It works in one event loop at a time."""

    capabilities = Capabilities(
        names=frozenset(Capability),
        shared=True,
        durable=True,
    )

    def __init__(
        self, *, clock: Clock | None = None, settings: RedisSettings | None = None
    ) -> None:
        """Create the backend without connecting. A test may pass a ``clock`` that replaces the store's time."""
        self._context = RedisContext(settings or load_settings(RedisSettings), clock)
        self.publisher = RedisPublisher(self._context)
        self.control = RedisControl(self._context)
        self.dead_letters = RedisDeadLetters(self._context)
        self.dependencies = RedisDependencies(self._context)
        self.slots = RedisSlots(self._context)
        self.audit = RedisAudit(self._context)
        self.schedules = RedisSchedules(self._context)
        self.listing = RedisListing(self._context, self.control)
        self.streams = RedisStreams(self._context)

    def subscribe(self, keys: Iterable[str], consumer: str) -> RedisSubscription:
        check_name("consumer", consumer)
        subscription = RedisSubscription(self._context, checked_keys(keys), consumer)
        self._context.wakeups.subscriptions[subscription] = None
        return subscription

    def now(self) -> float:
        return self._context.clock.now()

    async def health(self) -> Health:
        context = self._context
        details: dict[str, str | int | float | bool | None] = {"doorbell": context.wakeups.works}
        ok, anomalies, steps = not context.closing.is_set(), 0, 0
        if ok:
            try:
                async with asyncio.timeout(_HEALTH_SECONDS):
                    for partition in context.scripts.partitions.names:
                        found = await context.scripts.run("health", partition)
                        anomalies, steps = anomalies + int(found[0]), steps + int(found[1])
            except (TaskQueueError, TimeoutError) as error:
                ok = False
                details["error"] = str(error) or "the store did not execute a write in time"
        details["anomalies"] = anomalies
        details["clock_steps"] = steps
        details["resets"] = context.scripts.resets
        details["trouble"] = context.client.trouble.text
        if context.checks.facts is not None:
            details |= context.checks.facts.details()
        return Health(ok=ok, backend="redis", details=details)

    async def aclose(self) -> None:
        """Release all deliveries and close all connections.

        If the store is unavailable, give up after about a second, or after TASKQUEUE_REDIS_ANSWER_TIMEOUT if it has
        only just stopped answering. Waiting calls then raise `BackendUnavailable`, and the leases expire.
        """
        context = self._context
        if context.closing.is_set():
            return
        context.closing.set()
        deadline = asyncio.create_task(self._end_during_outage())
        try:
            for subscription in tuple(context.wakeups.subscriptions):
                with contextlib.suppress(
                    TaskQueueError
                ):  # unreleased deliveries are redelivered when their leases expire
                    await subscription.close()
            await self.publisher.sent()
            await context.checks.files.aclose()
            await context.background.drained()
            await context.heartbeat.aclose()
            await context.wakeups.aclose()
            await context.client.aclose()
            await self.slots.sent()
        finally:
            deadline.cancel()
            await asyncio.wait([deadline])

    async def _end_during_outage(self) -> None:
        """Close the connections once the store has been unavailable for a while, so that waiting calls fail."""
        pause = _OUTAGE_SECONDS
        while True:
            await asyncio.sleep(pause)
            # Wait longer if the store answers (`seconds` is 0), or has been unavailable for less than half a second.
            if self._context.client.trouble.seconds >= _OUTAGE_SECONDS / 2:
                break
            pause = _OUTAGE_SECONDS / 10
        await self._context.client.aclose()


def create_backend() -> RedisBackend:
    """Return a Redis backend with the settings from the environment."""
    return RedisBackend(settings=load_settings(RedisSettings))
