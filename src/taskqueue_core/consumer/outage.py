"""What becomes of a subscription's deliveries when its worker has left or vanished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.store_link import OUTAGES, PATIENCE
from taskqueue_core.errors import LeaseLost, TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery

__all__ = ["close", "give_up_as_lost"]

_TRIES = 4
_log = logging.getLogger("taskqueue.consuming")


async def close(subscription: Subscription) -> None:
    """Hand back all it owns, not as lost. Never raises: where the store stays away, the lease ends in its own time."""
    for attempt in range(1, _TRIES + 1):
        try:
            await subscription.close()
        except OUTAGES:
            await asyncio.sleep(PATIENCE.delay(attempt))
        except TaskQueueError as error:
            _log.warning("a subscription did not close", extra={"code": error.code})
            return
        else:
            return
    _log.warning("the store is away: deliveries come back when their lease ends")


async def give_up_as_lost(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    """Hand back what vanished with its worker: that counts a loss. Never raises; tries once, `close` does the rest."""
    for start in range(0, len(deliveries), LIMITS.batch):
        try:
            await subscription.redeliver(*deliveries[start : start + LIMITS.batch], lost=True)
        except LeaseLost:
            continue  # settled or taken over meanwhile
        except TaskQueueError as error:
            _log.warning("losses were not counted", extra={"code": error.code})
            return
