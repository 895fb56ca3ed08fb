"""The one wrapper around any backend: it fires hooks and makes spans and metrics, so that backends stay silent.

It adds no await and no per-task call of its own: a batch is one hook call and one span, and without plugins and
providers nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from taskqueue_core import telemetry
from taskqueue_core.authoring.helpers import SubscriptionBase, reject_ordering_keys
from taskqueue_core.backend import Backend, Capabilities, Capability, Publisher, Subscription
from taskqueue_core.capabilities import Control, Maintained
from taskqueue_core.errors import LeaseLost
from taskqueue_core.hooks import Hooks
from taskqueue_core.retry import Bury
from taskqueue_core.tasks import Confirmation, Delivery, Health, Received, Settled, Task

_LOST_TOO_OFTEN = Bury("max_losses_exceeded", None)
_STALE = (Settled.LEASE_LOST,)
"""what a single stale receipt would answer in a batch"""


class InstrumentedBackend:
    """A backend with hooks. Capabilities pass through, and an ordering key is refused where there is no ``order``."""

    def __init__(self, inner: Backend, hooks: Hooks) -> None:
        """Wrap ``inner``; the wrapper owns it and closes it."""
        self._inner = inner
        self._hooks = hooks
        orders = Capability.ORDER in inner.capabilities.names
        self._publisher = _ObservedPublisher(inner.publisher, hooks, orders=orders)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the backend."""
        return self._inner.capabilities

    @property
    def publisher(self) -> Publisher:
        """The backend's publisher, observed."""
        return self._publisher

    @property
    def inner(self) -> Backend:
        """The backend itself."""
        return self._inner

    @property
    def hooks(self) -> Hooks:
        """The hooks that it fires."""
        return self._hooks

    @property
    def control(self) -> Control:
        """The backend's control, observed where it ends tasks."""
        return _ObservedControl(self._inner.control, self._hooks)  # type: ignore[attr-defined]

    def subscribe(self, keys: Iterable[str], consumer: str) -> Subscription:
        """Open an observed subscription."""
        return _ObservedSubscription(self._inner.subscribe(keys, consumer), consumer, self._hooks)

    def now(self) -> float:
        """Return the store's time."""
        return self._inner.now()

    async def health(self) -> Health:
        """Ask the backend."""
        return await self._inner.health()

    async def aclose(self) -> None:
        """Close the backend."""
        await self._inner.aclose()

    def __getattr__(self, name: str) -> Any:
        """Pass other capabilities through."""
        return getattr(self._inner, name)


class _ObservedPublisher:
    def __init__(self, inner: Publisher, hooks: Hooks, *, orders: bool) -> None:
        self._inner = inner
        self._hooks = hooks
        self._orders = orders

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        if not self._orders:
            reject_ordering_keys(tasks)
        with telemetry.publishing(tasks) as carrying:
            confirmations = await self._inner.publish(*carrying)
        self._hooks.fire("published", tasks=carrying, confirmations=confirmations)
        return confirmations

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
    ) -> Confirmation:
        with telemetry.operation("retry", (task,)):
            confirmation = await self._inner.schedule_retry(
                task, at, error=error, token=token, settles=settles
            )
        self._hooks.fire(
            "retry_scheduled",
            task=task,
            at=at,
            error=error,
            confirmation=confirmation,
            settles=settles,
        )
        return confirmation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _ObservedSubscription(SubscriptionBase):
    def __init__(self, inner: Subscription, consumer: str, hooks: Hooks) -> None:
        self._inner = inner
        self._consumer = consumer
        self._hooks = hooks

    async def receive(self, limit: int, timeout: float | None) -> Received:
        with telemetry.operation("receive") as operation:
            received = await self._inner.receive(limit, timeout)
            if operation is not None:
                operation.tasks = _tasks(received.deliveries)
        if received.deliveries:
            self._hooks.fire("delivered", deliveries=received.deliveries, consumer=self._consumer)
        if received.expired:
            self._hooks.fire("expired", tasks=received.expired)
        return received

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        try:
            with _settling("ack", deliveries):
                outcomes = await self._inner.ack(*deliveries, results=results)
        except LeaseLost:
            self._hooks.fire("settled", deliveries=deliveries, verb="ack", outcomes=_STALE)
            raise
        self._hooks.fire("settled", deliveries=deliveries, verb="ack", outcomes=outcomes)
        return outcomes

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        verb = "lost" if lost else "redeliver"
        try:
            with _settling(verb, deliveries):
                outcomes = await self._inner.redeliver(*deliveries, lost=lost)
        except LeaseLost:
            self._hooks.fire("settled", deliveries=deliveries, verb=verb, outcomes=_STALE)
            raise
        self._hooks.fire("settled", deliveries=deliveries, verb=verb, outcomes=outcomes)
        if Settled.DEAD in outcomes:
            for delivery, outcome in zip(deliveries, outcomes, strict=True):
                if outcome is Settled.DEAD:
                    self._hooks.fire("dead_lettered", delivery=delivery, verdict=_LOST_TOO_OFTEN)
        return outcomes

    async def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None = None
    ) -> Settled:
        with _settling("dead_letter", (delivery,)):
            outcome: Settled = await self._inner.dead_letter(delivery, reason, error)  # type: ignore[attr-defined]
        self._hooks.fire("dead_lettered", delivery=delivery, verdict=Bury(reason, error))
        return outcome

    async def close(self) -> None:
        await self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _settling(verb: str, deliveries: Sequence[Delivery]) -> AbstractContextManager[object]:
    if not telemetry.active():
        return nullcontext()
    return telemetry.operation(verb, _tasks(deliveries))


def _tasks(deliveries: Sequence[Delivery]) -> list[Task]:
    return [delivery.task for delivery in deliveries]


class _ObservedControl:
    def __init__(self, inner: Control, hooks: Hooks) -> None:
        self._inner = inner
        self._hooks = hooks

    async def maintain(self) -> Maintained:
        try:
            done = await self._inner.maintain()
        except Exception:
            self._hooks.fire("maintained", done=None)
            raise
        self._hooks.fire("maintained", done=done)
        if done.expired:
            self._hooks.fire("expired", tasks=done.expired)
        if done.unclaimed:
            self._hooks.fire("unclaimed", keys=done.unclaimed)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
