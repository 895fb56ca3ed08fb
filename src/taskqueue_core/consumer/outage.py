"""What becomes of a subscription's deliveries when its worker has left or vanished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from taskqueue_core.backend import Subscription
from taskqueue_core.errors import BackendUnavailable, LeaseLost, PublishUnconfirmed, TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Delivery

T = TypeVar("T")

OUTAGE_ERRORS = (BackendUnavailable, PublishUnconfirmed)
"""after these the same call may be made again"""
OUTAGE_BACKOFF = RetryPolicy(base=0.1, cap=2.0, jitter=0.5)


class OutageRetry:
    """Shared by all that one consumer does with the store."""

    def __init__(self, report: Callable[[bool, str], Awaitable[None]]) -> None:
        """``report`` hears of each change: whether the store is there, and why not."""
        self._report = report
        self.down = False
        """whether the last answer was that the store is unavailable"""

    async def retry_until_available(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of a call that may be repeated, however long the store is away. Other errors pass."""
        tries = 0
        while True:
            try:
                answer = await call()
            except OUTAGE_ERRORS as error:
                tries += 1
                if not self.down:
                    self.down = True
                    await self._report(False, error.code)  # noqa: FBT003 - whether it is there
                await asyncio.sleep(OUTAGE_BACKOFF.delay(tries))
            else:
                if self.down:
                    self.down = False
                    await self._report(True, "")  # noqa: FBT003 - as above
                return answer


_TRIES = 4
_log = logging.getLogger("taskqueue.consuming")


async def close(subscription: Subscription) -> None:
    """Hand back all it owns, not as lost. Never raises: where the store stays away, the lease ends in its own time."""
    for attempt in range(1, _TRIES + 1):
        try:
            await subscription.close()
        except OUTAGE_ERRORS:
            await asyncio.sleep(OUTAGE_BACKOFF.delay(attempt))
        except TaskQueueError as error:
            _log.warning("could not close a subscription", extra={"code": error.code})
            return
        else:
            return
    _log.warning("store unavailable; deliveries will be redelivered when their leases expire")


async def release_as_lost(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    """Hand back what vanished with its worker: that counts a loss. Never raises; tries once, `close` does the rest."""
    for start in range(0, len(deliveries), LIMITS.batch):
        try:
            await subscription.redeliver(*deliveries[start : start + LIMITS.batch], lost=True)
        except LeaseLost:
            continue  # settled or taken over meanwhile
        except TaskQueueError as error:
            _log.warning("could not mark deliveries as lost", extra={"code": error.code})
            return
