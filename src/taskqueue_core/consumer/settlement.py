"""Carry out a verb on a delivery, through whatever the backend offers."""

from __future__ import annotations

from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import dead_lettering_of
from taskqueue_core.errors import LeaseLost
from taskqueue_core.retry import Ack, Bury, Redeliver, ScheduleRetry, Verb
from taskqueue_core.tasks import Delivery, Settled

__all__ = ["settle"]


async def settle(
    backend: Backend, subscription: Subscription, delivery: Delivery, verb: Verb
) -> Settled:
    """Settle one delivery; a stale receipt is an answer (`Settled.LEASE_LOST`), not an error.

    On a backend without ``atomic_retry`` the retry is published first and the delivery acked after:
    a crash in between runs the task once more rather than never.
    """
    try:
        match verb:
            case Ack(result):
                return (await subscription.ack(delivery, results=(result,)))[0]
            case Redeliver(lost):
                return (await subscription.redeliver(delivery, lost=lost))[0]
            case Bury(reason, error):
                return await dead_lettering_of(backend, subscription).dead_letter(
                    delivery, reason, error
                )
            case ScheduleRetry(delay, error):
                return await _retry(backend, subscription, delivery, delay, error)
    except LeaseLost:
        return Settled.LEASE_LOST


async def _retry(
    backend: Backend, subscription: Subscription, delivery: Delivery, delay: float, error: str
) -> Settled:
    at = backend.now() + delay
    await backend.publisher.schedule_retry(delivery.task, at, error=error, settles=delivery)
    if backend.capabilities.atomic_retry:
        return Settled.OK
    return (await subscription.ack(delivery))[0]
