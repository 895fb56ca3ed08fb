"""The lease by which one of all server processes reconciles the queue with the database."""

from __future__ import annotations

import contextlib
from secrets import token_hex

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import close
from taskqueue_core.errors import SettingsConflict
from taskqueue_core.tasks import Delivery, Task
from taskqueue_prefect.batching import is_current
from taskqueue_prefect.context import Host
from taskqueue_prefect.names import RECEIVER, connection_of

KEY = "prefect.reconcile"
"""queue of the lease"""
_TASK = Task(key=KEY, id="lease")
_MAX_LOSSES = 1000
_PUBLISH_SECONDS = 60.0
"""maximum number of seconds between two attempts to publish the task while waiting for the lease"""


class ReconcileLease:
    """The delivery of a task that is never acked. The process that has the delivery holds the lease.

    If that process ends, the task is delivered to another one. If the backend is not shared, each process holds its
    own lease.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._subscription: Subscription | None = None
        self._delivery: Delivery | None = None

    async def acquire(self) -> None:
        """Wait until this process holds the lease."""
        await self.release()
        if not self._host.backend.capabilities.shared:
            return
        settings = await self._host.control.settings(KEY)
        if settings.max_losses != _MAX_LOSSES:
            changes = {"max_losses": _MAX_LOSSES}
            with contextlib.suppress(SettingsConflict):  # another process has configured the queue
                await self._host.control.configure(KEY, settings.model_copy(update=changes))
        name = connection_of(RECEIVER, token_hex(4))
        self._subscription = self._host.backend.subscribe([KEY], name)
        while self._delivery is None:
            await self._host.backend.publisher.publish(_TASK)
            deliveries = (await self._subscription.receive(1, _PUBLISH_SECONDS)).deliveries
            if deliveries and deliveries[0].losses:
                # With all its losses, the task would become a dead letter one day; a new attempt has none.
                (delivery,) = deliveries
                await self._host.backend.publisher.schedule_retry(
                    _TASK, self._host.backend.now(), token=token_hex(16), settles=delivery
                )
            elif deliveries:
                (self._delivery,) = deliveries

    async def is_held(self) -> bool:
        """Return whether this process holds the lease, which it loses if it is suspended for too long."""
        if self._delivery is None:
            return not self._host.backend.capabilities.shared
        (status,) = await self._host.control.statuses(KEY, _TASK.id)
        return is_current(status, self._delivery)

    async def release(self) -> None:
        """Let another process have the lease."""
        subscription, self._subscription, self._delivery = self._subscription, None, None
        if subscription is not None:
            await close(subscription)
