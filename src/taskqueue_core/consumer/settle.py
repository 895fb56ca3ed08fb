"""Settling deliveries in the store in batches. Calls are repeated during an outage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import msgspec

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import QueueSettings, control_of, dead_lettering_of, has
from taskqueue_core.concurrency import gather_all
from taskqueue_core.consumer.outage import OutageRetry
from taskqueue_core.errors import LeaseLost
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import (
    Ack,
    Bury,
    Failed,
    Outcome,
    Redeliver,
    Rejected,
    RetryLater,
    ScheduleRetry,
    Verb,
    decide,
)
from taskqueue_core.tasks import Delivery, Settled


async def settle(
    backend: Backend, subscription: Subscription, delivery: Delivery, verb: Verb
) -> Settled:
    """Settle one delivery. Return `Settled.LEASE_LOST`, instead of raising, for a receipt that is not current.

    If the backend has no ``atomic_retry``, a retry is scheduled before its delivery is acked, so that a crash between
    these two calls repeats the task but never loses it.
    """
    try:
        match verb:
            case Ack(result):
                return (await subscription.ack(delivery, results=(result,)))[0]
            case ScheduleRetry(delay, error, free, traceback):
                at, task = backend.now() + delay, delivery.task
                await backend.publisher.schedule_retry(
                    task, at, error=error, settles=delivery, free=free, traceback=traceback
                )
                if backend.capabilities.atomic_retry:
                    return Settled.OK
                return (await subscription.ack(delivery))[0]
            case Redeliver(lost):
                return (await subscription.redeliver(delivery, lost=lost))[0]
            case Bury(reason, error, traceback):
                return await dead_lettering_of(backend, subscription).dead_letter(
                    delivery, reason, error, traceback
                )
    except LeaseLost:
        return Settled.LEASE_LOST


_BYTES = 4 * 1024 * 1024
"""maximum size, in bytes, of all results in one call; a single larger result is sent alone"""
_MAX_CONCURRENT = 100
"""maximum number of concurrent calls for retries and dead letters"""
_DEFAULTS = QueueSettings()
_BY_POLICY = (Failed, RetryLater)
"""outcomes that the retry policy of the queue decides"""

Done = tuple[Delivery, bytes | None]


class Settler:
    """Settles a subscription's deliveries. Each method returns, by receipt, whether the receipt was still current.

    During an outage, a call is repeated until the store is available. If a method is cancelled, no task is lost. If the
    backend has no ``control``, the default retry policy applies to all queues. ``uniform`` returns a random number from
    0 to 1, for the jitter of retries.
    """

    def __init__(
        self,
        backend: Backend,
        subscription: Subscription,
        outage: OutageRetry,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._backend = backend
        self._uniform = uniform
        self._subscription = subscription
        self._outage = outage
        self._control = control_of(backend) if has(backend, Capability.CONTROL) else None

    async def ack(self, done: Sequence[Done]) -> dict[str, bool]:
        """End deliveries whose tasks were executed, each with its result."""
        results: dict[str, bool] = {}
        for batch in _batches(done):
            deliveries = [delivery for delivery, _ in batch]
            values = [result for _, result in batch]
            call = partial(
                self._subscription.ack, *deliveries, results=values if any(values) else ()
            )
            results |= await self._settle_batch(deliveries, call)
        return results

    async def redeliver(self, deliveries: Sequence[Delivery]) -> dict[str, bool]:
        """Release deliveries, without counting a loss."""
        results: dict[str, bool] = {}
        for start in range(0, len(deliveries), LIMITS.batch):
            batch = deliveries[start : start + LIMITS.batch]
            results |= await self._settle_batch(
                batch, partial(self._subscription.redeliver, *batch)
            )
        return results

    async def _settle_batch(
        self, deliveries: Sequence[Delivery], call: Callable[[], Awaitable[tuple[Settled, ...]]]
    ) -> dict[str, bool]:
        try:
            answers = await self._outage.retry_until_available(call)
        except LeaseLost:
            answers = (Settled.LEASE_LOST,)
        return {
            delivery.receipt: answer.ok
            for delivery, answer in zip(deliveries, answers, strict=True)
        }

    async def settle_outcomes(
        self, outcomes: Sequence[tuple[Delivery, Outcome]]
    ) -> dict[str, bool]:
        """Settle deliveries according to the retry policies of their queues, which each call reads from the store."""
        results: dict[str, bool] = {}
        remaining = list(outcomes)
        await self._outage.retry_until_available(
            partial(self._settle_remaining, remaining, results)
        )
        return results

    async def _settle_remaining(
        self, remaining: list[tuple[Delivery, Outcome]], results: dict[str, bool]
    ) -> None:
        settings = await self._settings(
            {d.task.key for d, outcome in remaining if _needs_settings(outcome)}
        )
        while remaining:
            batch = remaining[:_MAX_CONCURRENT]
            verbs = (
                decided(
                    outcome,
                    delivery,
                    settings.get(delivery.task.key, _DEFAULTS),
                    self._uniform,
                )
                for delivery, outcome in batch
            )
            answers = await asyncio.gather(
                *(
                    settle(self._backend, self._subscription, delivery, verb)
                    for (delivery, _), verb in zip(batch, verbs, strict=True)
                ),
                return_exceptions=True,
            )
            failed = []
            for entry, answer in zip(batch, answers, strict=True):
                if isinstance(answer, Settled):
                    results[entry[0].receipt] = answer.ok
                else:
                    failed.append((entry, answer))
            remaining[: len(batch)] = [entry for entry, _ in failed]
            if failed:
                raise failed[0][1]

    async def _settings(self, keys: set[str]) -> dict[str, QueueSettings]:
        if self._control is None:
            return {}
        settings = await gather_all(self._control.settings(key) for key in keys)
        return dict(zip(keys, settings, strict=True))


def _needs_settings(outcome: Outcome) -> bool:
    if type(outcome) in _BY_POLICY:
        return True
    return isinstance(outcome, Rejected) and outcome.traceback is not None


def decided(
    outcome: Outcome,
    delivery: Delivery,
    settings: QueueSettings,
    uniform: Callable[[], float],
) -> Verb:
    """Return how to settle a delivery, by the retry policy of its queue. Tracebacks are left out if it says so."""
    verb = decide(outcome, delivery, settings.retry, uniform)
    if not settings.keep_tracebacks and isinstance(verb, Bury | ScheduleRetry):
        return msgspec.structs.replace(verb, traceback=None)
    return verb


def _batches(done: Sequence[Done]) -> Iterator[Sequence[Done]]:
    start = size = 0
    for index, (_, result) in enumerate(done):
        length = 0 if result is None else len(result)
        if index - start == LIMITS.batch or (index > start and size + length > _BYTES):
            yield done[start:index]
            start, size = index, 0
        size += length
    if start < len(done):
        yield done[start:]
