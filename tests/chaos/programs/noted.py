"""A backend wrapper that records the deliveries and settlements of its subscriptions; servers use it in chaos runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from taskqueue_core.authoring.helpers import SubscriptionBase
from taskqueue_core.backend import Backend, Capabilities, Subscription
from taskqueue_core.errors import BackendUnavailable, LeaseLost
from taskqueue_core.tasks import Confirmation, Delivery, Health, Received, Settled, Task
from tests.chaos.history import Log, What


class NotedBackend:
    """Passes all calls to another backend; its publisher and subscriptions record settlements.

    Nothing is recorded about the queues in ``unnoted``.
    """

    def __init__(self, inner: Backend, log: Log, *, unnoted: Iterable[str] = ()) -> None:
        self.inner = inner
        self.log = log
        self._unnoted = frozenset(unnoted)
        self.publisher = _NotedPublisher(inner, log, self._unnoted)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped backend, for example its control, so that it has all capabilities."""
        return getattr(self.inner, name)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the wrapped backend."""
        return self.inner.capabilities

    def subscribe(self, keys: Iterable[str], consumer: str) -> Subscription:
        """Open a subscription that records deliveries and settlements."""
        keys = tuple(keys)
        if self._unnoted.intersection(keys):
            return self.inner.subscribe(keys, consumer)
        return _NotedSubscription(self.inner.subscribe(keys, consumer), self.log)

    def now(self) -> float:
        """Return the store's time."""
        return self.inner.now()

    async def health(self) -> Health:
        """Return the health of the wrapped backend."""
        return await self.inner.health()

    async def aclose(self) -> None:
        """Close the wrapped backend."""
        await self.inner.aclose()


@contextmanager
def _settling(
    log: Log, verb: str, deliveries: Sequence[Delivery], due: float | None = None
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Record a settlement call for each delivery; yield a function that records the answers. Record errors, too."""
    call = log.next_call()

    def answered(outcomes: Sequence[str]) -> None:
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            log.about(delivery, What.SETTLED, call=call, verb=verb, outcome=outcome)

    for delivery in deliveries:
        log.about(delivery, What.SETTLE, call=call, verb=verb, due=due)
    try:
        yield answered
    except LeaseLost:
        answered(["lease_lost"])
        raise
    except BackendUnavailable:
        answered(["unknown"] * len(deliveries))
        raise


class _NotedPublisher:
    def __init__(self, inner: Backend, log: Log, unnoted: frozenset[str]) -> None:
        self.inner = inner
        self.log = log
        self._unnoted = unnoted

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Publish tasks, without a record because producers record it themselves."""
        return await self.inner.publisher.publish(*tasks)

    async def schedule_retry(
        self, task: Task, at: float, *, settles: Delivery | None = None, **more: Any
    ) -> Confirmation:
        """Schedule a retry and record it."""
        if task.key in self._unnoted:
            return await self.inner.publisher.schedule_retry(task, at, settles=settles, **more)
        if settles is None:
            self.log.note(What.RETRY, key=task.key, task=task.id, due=at)
            return await self.inner.publisher.schedule_retry(task, at, **more)
        with _settling(self.log, "retry", [settles], at) as answered:
            told = await self.inner.publisher.schedule_retry(task, at, settles=settles, **more)
            answered(["ok" if told.status.value == "accepted" else "duplicate"])
        return told


class _NotedSubscription(SubscriptionBase):
    def __init__(self, inner: Any, log: Log) -> None:
        self.inner = inner
        self.log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Receive and record the deliveries."""
        try:
            received: Received = await self.inner.receive(limit, timeout)
        except BaseException:
            self.log.note(What.BLIND)
            raise
        self.log.note(What.RECEIVED, count=len(received.deliveries))
        for delivery in received.deliveries:
            self.log.came(delivery)
        return received

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """Ack deliveries and record the answers."""
        with _settling(self.log, "ack", deliveries) as answered:
            told: tuple[Settled, ...] = await self.inner.ack(*deliveries, results=results)
            answered([one.value for one in told])
        return told

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Return deliveries to their queues and record the answers."""
        with _settling(self.log, "lost" if lost else "redeliver", deliveries) as answered:
            told: tuple[Settled, ...] = await self.inner.redeliver(*deliveries, lost=lost)
            answered([one.value for one in told])
        return told

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        error: str | None = None,
        traceback: str | None = None,
    ) -> Settled:
        """Dead-letter a delivery and record the answer."""
        with _settling(self.log, "dead_letter", [delivery]) as answered:
            told: Settled = await self.inner.dead_letter(delivery, reason, error, traceback)
            answered([told.value])
        return told

    async def adopt(self, *receipts: str, **more: Any) -> tuple[Delivery | None, ...]:
        """Adopt deliveries and record those that were adopted."""
        told: tuple[Delivery | None, ...] = await self.inner.adopt(*receipts, **more)
        for delivery in told:
            if delivery is not None:
                self.log.came(delivery, What.ADOPTED)
        return told

    async def revoked(self) -> tuple[str, ...]:
        """Wait for revoked receipts and record them."""
        receipts: tuple[str, ...] = await self.inner.revoked()
        for receipt in receipts:
            self.log.note(What.REVOKED, receipt=receipt)
        return receipts

    async def close(self) -> None:
        """Close the subscription and record it."""
        self.log.note(What.CLOSE)
        await self.inner.close()
        self.log.note(What.CLOSED)
