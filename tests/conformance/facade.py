"""A backend around the memory backend: correct as it stands, and made to be broken by a subclass of it or of a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from taskqueue_core.authoring.helpers import (
    SubscriptionBase,
    checked_settings,
    reject_ordering_keys,
)
from taskqueue_core.backend import Capabilities, Capability, Publisher
from taskqueue_core.capabilities import Control, DeadLetters, Durability, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.limits import check_time
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Health,
    Published,
    Received,
    Settled,
    State,
    Task,
)
from taskqueue_memory import MemoryBackend
from taskqueue_memory.slots.pool import MemorySlots
from taskqueue_memory.slots.transitions import Pool
from taskqueue_memory.subscription import MemorySubscription


class Part:
    """Passes on whatever a subclass does not break."""

    def __init__(self, inner: Any, facade: Facade) -> None:
        """Stand before ``inner``."""
        self.inner = inner
        self.facade = facade

    def __getattr__(self, name: str) -> Any:
        """Pass on."""
        return getattr(self.inner, name)


class FacadePublisher(Part):
    """The publisher."""

    inner: Publisher

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Pass on."""
        return await self.inner.publish(*tasks)

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        """Pass on."""
        return await self.inner.schedule_retry(task, at, **options)


class FacadeControl(Part):
    """The operator's side."""

    inner: Control


class FacadeDeadLetters(Part):
    """The dead letters."""

    inner: DeadLetters


class FacadeSlots(Part):
    """The pool of slots."""

    inner: MemorySlots

    @property
    def pool(self) -> Pool:
        """What the memory backend keeps."""
        return self.inner._pool


class FacadeSubscription(SubscriptionBase):
    """A subscription."""

    def __init__(self, inner: MemorySubscription, facade: Facade, consumer: str) -> None:
        """Stand before ``inner``."""
        self.inner = inner
        self.facade = facade
        self.consumer = consumer

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Pass on."""
        return await self.inner.receive(limit, timeout)

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """Pass on."""
        return await self.inner.ack(*deliveries, results=results)

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Pass on."""
        return await self.inner.redeliver(*deliveries, lost=lost)

    async def close(self) -> None:
        """Pass on."""
        await self.inner.close()

    def __getattr__(self, name: str) -> Any:
        """Pass on."""
        return getattr(self.inner, name)


class Facade:
    """The backend. A subclass names the parts that it breaks."""

    publisher_type: type[FacadePublisher] = FacadePublisher
    subscription_type: type[FacadeSubscription] = FacadeSubscription
    control_type: type[FacadeControl] = FacadeControl
    dead_letters_type: type[FacadeDeadLetters] = FacadeDeadLetters
    slots_type: type[FacadeSlots] = FacadeSlots

    def __init__(self, clock: ManualClock, inner: MemoryBackend | None = None) -> None:
        """Stand before a fresh memory backend, or share ``inner`` with another facade."""
        self.inner = inner or MemoryBackend(clock=clock)
        self.clock = clock
        self.subscriptions: list[FacadeSubscription] = []
        self.retries: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
        self.tokens: set[tuple[str, str, str | None]] = set()
        self.shown: tuple[Delivery, ...] = ()
        self.values: dict[str, QueueSettings] = {}
        self.publisher = self.publisher_type(self.inner.publisher, self)
        self.control = self.control_type(self.inner.control, self)
        self.dead_letters = self.dead_letters_type(self.inner.dead_letters, self)
        self.slots = self.slots_type(self.inner.slots, self)

    @property
    def capabilities(self) -> Capabilities:
        """Those of the memory backend."""
        return self.inner.capabilities

    def subscribe(self, keys: Iterable[str], consumer: str) -> FacadeSubscription:
        """Open a subscription."""
        inner = self.inner.subscribe(keys, consumer)
        self.subscriptions.append(self.subscription_type(inner, self, consumer))
        return self.subscriptions[-1]

    def now(self) -> float:
        """Return the store's time."""
        return self.inner.now()

    async def health(self) -> Health:
        """Pass on."""
        return await self.inner.health()

    async def aclose(self) -> None:
        """Close what was opened here."""
        for subscription in self.subscriptions:
            await subscription.close()


Broken = type[Facade | Part | FacadeSubscription]
"""A backend that breaks a promise, or the part of one that does."""
_PARTS: dict[str, type[Part | FacadeSubscription]] = {
    "publisher_type": FacadePublisher,
    "subscription_type": FacadeSubscription,
    "control_type": FacadeControl,
    "dead_letters_type": FacadeDeadLetters,
    "slots_type": FacadeSlots,
}


def backend_of(broken: Broken) -> type[Facade]:
    """Return a backend, or one that has a part."""
    if issubclass(broken, Facade):
        return broken
    (name,) = (name for name, part in _PARTS.items() if issubclass(broken, part))
    return type(broken.__name__, (Facade,), {name: broken})


class _LesserPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        if Capability.ORDER not in self.facade.capabilities.names:
            reject_ordering_keys(tasks)
        return await super().publish(*tasks)


class _LesserControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        names = self.facade.capabilities.names
        checked_settings(
            settings,
            {Durability.MEMORY},
            flow=Capability.FLOW in names,
            order=Capability.ORDER in names,
            fan_out=Capability.FAN_OUT in names,
        )
        return await self.inner.configure(key, settings)


class Minimal(Facade):
    """Nothing beyond the contract. A subclass may have ``names`` beyond it."""

    names: frozenset[Capability] = frozenset()
    publisher_type = _LesserPublisher
    control_type = _LesserControl

    @property
    def capabilities(self) -> Capabilities:
        """No others."""
        return Capabilities(names=self.names)


class Replicated(Facade):
    """Several facades on one memory backend, which outlives them."""

    @property
    def capabilities(self) -> Capabilities:
        """All, shared and durable."""
        return Capabilities(names=frozenset(Capability), shared=True, durable=True)


class _TwoStepPublisher(FacadePublisher):
    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        check_time("at", at)
        (present,) = await self.facade.inner.control.statuses(task.key, task.id)
        settles = options.get("settles")
        attempt = f"attempt:{settles.attempt}" if settles else None
        token = (task.key, task.id, options.get("token") or attempt)
        if present is None or present.state is not State.IN_FLIGHT:
            self.facade.tokens.add(token)
            return await super().schedule_retry(task, at, **options)
        known = token in self.facade.tokens
        if not known:
            self.facade.retries[task.key, task.id] = (at, options)
        status = Published.DUPLICATE if known else Published.ACCEPTED
        return Confirmation(key=task.key, task_id=task.id, status=status)


class _TwoStepSubscription(FacadeSubscription):
    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        for delivery in deliveries:
            task = delivery.task
            if (task.key, task.id) in self.facade.retries:
                at, options = self.facade.retries.pop((task.key, task.id))
                publisher = self.facade.inner.publisher
                await publisher.schedule_retry(task, at, **options | {"settles": delivery})
                return (Settled.OK,)
        return await super().ack(*deliveries, results=results)


class TwoSteps(Facade):
    """A retry that settles takes two steps: it is published first, and core acks after."""

    publisher_type = _TwoStepPublisher
    subscription_type = _TwoStepSubscription

    @property
    def capabilities(self) -> Capabilities:
        """All, but no atomic retry."""
        return Capabilities(names=frozenset(Capability), atomic_retry=False)
