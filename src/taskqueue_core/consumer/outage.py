"""Repeating store calls during an outage, and closing the subscription of a worker that has left or crashed."""

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
"""exceptions after which the same call may be repeated"""
OUTAGE_BACKOFF = RetryPolicy(base=0.1, cap=2.0, jitter=0.5)


class OutageRetry:
    """Repeats store calls during an outage. One object serves all calls of a consumer.

    ``report`` is called once when an outage starts, with False and the error code, and once when it ends, with True.
    """

    def __init__(self, report: Callable[[bool, str], Awaitable[None]]) -> None:
        self._report = report
        self.down = False
        """whether the last call failed because the store was unavailable"""

    async def retry_until_available(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call, which is repeated with backoff while it raises one of `OUTAGE_ERRORS`."""
        tries = 0
        while True:
            try:
                answer = await call()
            except OUTAGE_ERRORS as error:
                tries += 1
                if not self.down:
                    self.down = True
                    await self._report(False, error.code)  # noqa: FBT003 - False means that the store is unavailable
                await asyncio.sleep(OUTAGE_BACKOFF.delay(tries))
            else:
                if self.down:
                    self.down = False
                    await self._report(True, "")  # noqa: FBT003 - True means that the store is available again
                return answer


def log_fields(error: TaskQueueError | TimeoutError) -> dict[str, str]:
    """Return the fields with which a log record says why a call to the store failed."""
    if isinstance(error, TaskQueueError):
        return {"code": error.code, "reason": str(error)}
    return {"code": "timeout"}


class Failures:
    """The failures in a row of a loop that continues after any error. Only the first of them is logged."""

    def __init__(self, log: logging.Logger, text: str) -> None:
        """Count from 0. ``text`` is what the log says of a failure."""
        self._log = log
        self._text = f"{text} (further failures in a row are not logged)"
        self._logged = False
        self.number = 0
        """the number of failures since the last success"""

    def add(self, error: Exception) -> None:
        """Count a failure. An error that the store's absence does not explain is logged with its traceback."""
        self.number += 1
        if self._logged:
            return
        self._logged = True
        if isinstance(error, TaskQueueError | TimeoutError):
            self._log.warning(self._text, extra=log_fields(error))
        else:
            self._log.error(self._text, exc_info=error)

    def clear(self) -> None:
        """Count from 0 again, after a success."""
        self.number, self._logged = 0, False

    @property
    def pause(self) -> float:
        """The number of seconds to wait before the next try."""
        return OUTAGE_BACKOFF.delay(self.number)


_TRIES = 4
_log = logging.getLogger("taskqueue.consuming")


async def close(subscription: Subscription) -> None:
    """Close a subscription to release its deliveries. Never raises: after a failure, their leases expire."""
    for attempt in range(1, _TRIES + 1):
        try:
            await subscription.close()
        except OUTAGE_ERRORS:
            await asyncio.sleep(OUTAGE_BACKOFF.delay(attempt))
        except TaskQueueError as error:
            _log.warning("could not close a subscription", extra=log_fields(error))
            return
        else:
            return
    _log.warning("store unavailable; deliveries will be redelivered when their leases expire")


async def release_as_lost(subscription: Subscription, deliveries: Sequence[Delivery]) -> None:
    """Release a crashed worker's deliveries as lost. Stops at an error without raising; `close` releases the rest."""
    for start in range(0, len(deliveries), LIMITS.batch):
        try:
            await subscription.redeliver(*deliveries[start : start + LIMITS.batch], lost=True)
        except LeaseLost:
            continue  # the only delivery of this batch was settled or adopted before
        except TaskQueueError as error:
            _log.warning("could not mark deliveries as lost", extra=log_fields(error))
            return
