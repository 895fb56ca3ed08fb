"""A backend that notes what its subscriptions hand out and settle: what a server does for its workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from taskqueue_core.authoring import SubscriptionBase
from taskqueue_core.backend import Backend, Capabilities
from taskqueue_core.errors import BackendUnavailable, LeaseLost
from taskqueue_core.tasks import Confirmation, Delivery, Health, Received, Settled, Task
from tests.chaos.history import Log, What

__all__ = ["NotedBackend"]


class NotedBackend:
    """Passes everything on."""

    def __init__(self, inner: Backend, log: Log) -> None:
        self.inner = inner
        self.log = log
        self.publisher = _NotedPublisher(inner, log)
        self.control = inner.control  # type: ignore[attr-defined]
        self.dead_letters = inner.dead_letters  # type: ignore[attr-defined]

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend."""
        return self.inner.capabilities

    def subscribe(self, keys: Iterable[str], consumer: str) -> _NotedSubscription:
        """Open a subscription."""
        return _NotedSubscription(self.inner.subscribe(keys, consumer), self.log)

    def now(self) -> float:
        """Return the store's time."""
        return self.inner.now()

    async def health(self) -> Health:
        """Ask the store."""
        return await self.inner.health()

    async def aclose(self) -> None:
        """Close the backend."""
        await self.inner.aclose()


class _Calls:
    """Notes a call for each receipt, and its answers."""

    def __init__(
        self, log: Log, verb: str, deliveries: Sequence[Delivery], due: float | None
    ) -> None:
        self.log = log
        self.verb = verb
        self.deliveries = deliveries
        self.call = log.next_call()
        self._note(What.SETTLE, [""] * len(deliveries), due=due)

    def answered(self, outcomes: Sequence[str]) -> None:
        """Note the answers."""
        self._note(What.SETTLED, outcomes)

    def _note(self, what: What, outcomes: Sequence[str], **fields: Any) -> None:
        for delivery, outcome in zip(self.deliveries, outcomes, strict=True):
            self.log.note(
                what,
                call=self.call,
                key=delivery.task.key,
                task=delivery.task.id,
                receipt=delivery.receipt,
                attempt=delivery.attempt,
                verb=self.verb,
                outcome=outcome,
                **fields,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, LeaseLost):
            self.answered(["lease_lost"])
        elif isinstance(error, BackendUnavailable):
            self.answered(["unknown"] * len(self.deliveries))


class _NotedPublisher:
    def __init__(self, inner: Backend, log: Log) -> None:
        self.inner = inner
        self.log = log

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Publish; producers note it themselves."""
        return await self.inner.publisher.publish(*tasks)

    async def schedule_retry(
        self, task: Task, at: float, *, settles: Delivery | None = None, **more: Any
    ) -> Confirmation:
        """Schedule a retry."""
        if settles is None:
            self.log.note(What.RETRY, key=task.key, task=task.id, due=at)
            return await self.inner.publisher.schedule_retry(task, at, **more)
        with _Calls(self.log, "retry", [settles], at) as calls:
            told = await self.inner.publisher.schedule_retry(task, at, settles=settles, **more)
            calls.answered(["ok" if told.status.value == "accepted" else "duplicate"])
        return told


class _NotedSubscription(SubscriptionBase):
    def __init__(self, inner: Any, log: Log) -> None:
        self.inner = inner
        self.log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Receive."""
        try:
            received: Received = await self.inner.receive(limit, timeout)
        except BaseException:
            self.log.note(What.BLIND)
            raise
        self.log.note(What.RECEIVED, count=len(received.deliveries))
        for delivery in received.deliveries:
            self._delivered(What.DELIVERED, delivery)
        return received

    def _delivered(self, what: What, delivery: Delivery) -> None:
        self.log.note(
            what,
            key=delivery.task.key,
            task=delivery.task.id,
            receipt=delivery.receipt,
            attempt=delivery.attempt,
            losses=delivery.losses,
            prior=delivery.prior,
            store_at=delivery.delivered_at,
        )

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """Ack."""
        with _Calls(self.log, "ack", deliveries, None) as calls:
            told: tuple[Settled, ...] = await self.inner.ack(*deliveries, results=results)
            calls.answered([one.value for one in told])
        return told

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Hand back."""
        with _Calls(self.log, "lost" if lost else "redeliver", deliveries, None) as calls:
            told: tuple[Settled, ...] = await self.inner.redeliver(*deliveries, lost=lost)
            calls.answered([one.value for one in told])
        return told

    async def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None = None
    ) -> Settled:
        """Bury."""
        with _Calls(self.log, "dead_letter", [delivery], None) as calls:
            told: Settled = await self.inner.dead_letter(delivery, reason, error)
            calls.answered([told.value])
        return told

    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        """Adopt."""
        told: tuple[Delivery | None, ...] = await self.inner.adopt(*receipts)
        for delivery in told:
            if delivery is not None:
                self._delivered(What.ADOPTED, delivery)
        return told

    async def revoked(self) -> tuple[str, ...]:
        """Wait for revocations."""
        receipts: tuple[str, ...] = await self.inner.revoked()
        for receipt in receipts:
            self.log.note(What.REVOKED, receipt=receipt)
        return receipts

    async def close(self) -> None:
        """Close."""
        self.log.note(What.CLOSE)
        await self.inner.close()
        self.log.note(What.CLOSED)
