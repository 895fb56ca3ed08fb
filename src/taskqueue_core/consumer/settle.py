"""Many verdicts to the store: one call per verb and piece, repeated until the store answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import control_of, dead_lettering_of, has
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.errors import LeaseLost
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import (
    Ack,
    Bury,
    Outcome,
    Redeliver,
    RetryPolicy,
    ScheduleRetry,
    Verb,
    decide,
)
from taskqueue_core.tasks import Delivery, Settled


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


_BYTES = 4 * 1024 * 1024
"""results of one call, unless a single one is larger"""
_DEFAULT = RetryPolicy()

Done = tuple[Delivery, bytes | None]


class SettlementQueue:
    """Settles a subscription's deliveries. Each method says for each receipt whether it was still current.

    An outage only delays: the same call is made again. Cancelling it loses nothing.
    """

    def __init__(self, backend: Backend, subscription: Subscription, store: OutageRetry) -> None:
        """Without ``control`` there are no settings to read, and the default retry policy holds."""
        self._backend = backend
        self._subscription = subscription
        self._store = store
        self._control = control_of(backend) if has(backend, Capability.CONTROL) else None

    async def ack(self, done: Sequence[Done]) -> dict[str, bool]:
        """End deliveries as executed, each with its result."""
        outcomes: dict[str, bool] = {}
        for piece in _pieces(done):
            deliveries = [delivery for delivery, _ in piece]
            results = [result for _, result in piece]
            if not any(results):
                results = []
            outcomes |= await self._batch(
                deliveries, partial(self._subscription.ack, *deliveries, results=results)
            )
        return outcomes

    async def redeliver(self, deliveries: Sequence[Delivery]) -> dict[str, bool]:
        """Hand deliveries back, not as lost."""
        outcomes: dict[str, bool] = {}
        for start in range(0, len(deliveries), LIMITS.batch):
            part = deliveries[start : start + LIMITS.batch]
            outcomes |= await self._batch(part, partial(self._subscription.redeliver, *part))
        return outcomes

    async def settle_outcome(self, delivery: Delivery, outcome: Outcome) -> dict[str, bool]:
        """Settle one delivery by what the queue's retry policy says to its outcome."""
        settled = await self._store.retry_until_available(
            partial(self._settle_once, delivery, outcome)
        )
        return {delivery.receipt: settled.ok}

    async def _settle_once(self, delivery: Delivery, outcome: Outcome) -> Settled:
        # Settings are read for each verdict: a confirmed change acts on the next (law 9).
        policy = _DEFAULT
        if self._control is not None:
            policy = (await self._control.settings(delivery.task.key)).retry
        verb = decide(outcome, delivery, policy)
        return await settle(self._backend, self._subscription, delivery, verb)

    async def _batch(
        self, deliveries: Sequence[Delivery], call: Callable[[], Awaitable[tuple[Settled, ...]]]
    ) -> dict[str, bool]:
        try:
            answers = await self._store.retry_until_available(call)
        except LeaseLost:
            answers = (Settled.LEASE_LOST,)
        return {
            delivery.receipt: answer.ok
            for delivery, answer in zip(deliveries, answers, strict=True)
        }


def _pieces(done: Sequence[Done]) -> Iterator[Sequence[Done]]:
    start = size = 0
    for index, (_, result) in enumerate(done):
        length = 0 if result is None else len(result)
        if index - start == LIMITS.batch or (index > start and size + length > _BYTES):
            yield done[start:index]
            start, size = index, 0
        size += length
    if start < len(done):
        yield done[start:]
