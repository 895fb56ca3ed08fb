"""A correct backend that forwards to the memory backend; tests subclass it, or one of its parts, to add a defect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from taskqueue_core.authoring.helpers import (
    SubscriptionBase,
    checked_settings,
)
from taskqueue_core.authoring.unsupported import field_checks, reject_unique_keys
from taskqueue_core.backend import Capabilities, Capability, Publisher
from taskqueue_core.capabilities import Control, DeadLetters, Durability, QueueSettings
from taskqueue_core.capabilities.schedules import Fire, Fired
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
    """A part of a backend, such as its publisher, that forwards everything that a subclass does not override."""

    def __init__(self, inner: Any, facade: Facade) -> None:
        self.inner = inner
        self.facade = facade

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped part."""
        return getattr(self.inner, name)


class FacadePublisher(Part):
    """A publisher that forwards to the memory backend."""

    inner: Publisher

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Forward the call to the wrapped publisher."""
        return await self.inner.publish(*tasks)

    async def schedule_retry(self, task: Task, at: float, **options: Any) -> Confirmation:
        """Forward the call to the wrapped publisher."""
        return await self.inner.schedule_retry(task, at, **options)


class FacadeAudit(Part):
    """An audit log that forwards to the memory backend."""


class FacadeSchedules(Part):
    """Schedules that forward to the memory backend."""


class FacadeStreams(Part):
    """Streams that forward to the memory backend."""


class FacadeDependencies(Part):
    """Dependencies that forward to the memory backend."""


class FacadeListing(Part):
    """Lists that forward to the memory backend."""


class FacadeControl(Part):
    """A control that forwards to the memory backend."""

    inner: Control


class FacadeDeadLetters(Part):
    """A dead-letter interface that forwards to the memory backend."""

    inner: DeadLetters


class FacadeSlots(Part):
    """A slot pool that forwards to the memory backend."""

    inner: MemorySlots

    @property
    def pool(self) -> Pool:
        """The internal state of the memory backend's slot pool."""
        return self.inner._pool


class FacadeSubscription(SubscriptionBase):
    """A subscription that forwards to one of the memory backend."""

    def __init__(self, inner: MemorySubscription, facade: Facade, consumer: str) -> None:
        self.inner = inner
        self.facade = facade
        self.consumer = consumer

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """Forward the call to the wrapped subscription."""
        return await self.inner.receive(limit, timeout)

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """Forward the call to the wrapped subscription."""
        return await self.inner.ack(*deliveries, results=results)

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Forward the call to the wrapped subscription."""
        return await self.inner.redeliver(*deliveries, lost=lost)

    async def close(self) -> None:
        """Forward the call to the wrapped subscription."""
        await self.inner.close()

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of the wrapped subscription."""
        return getattr(self.inner, name)


class Facade:
    """A backend that forwards to the memory backend; a subclass names the classes of the parts that it breaks."""

    publisher_type: type[FacadePublisher] = FacadePublisher
    subscription_type: type[FacadeSubscription] = FacadeSubscription
    control_type: type[FacadeControl] = FacadeControl
    dead_letters_type: type[FacadeDeadLetters] = FacadeDeadLetters
    slots_type: type[FacadeSlots] = FacadeSlots
    schedules_type: type[FacadeSchedules] = FacadeSchedules
    audit_type: type[FacadeAudit] = FacadeAudit
    dependencies_type: type[FacadeDependencies] = FacadeDependencies
    listing_type: type[FacadeListing] = FacadeListing
    streams_type: type[FacadeStreams] = FacadeStreams

    def __init__(self, clock: ManualClock, inner: MemoryBackend | None = None) -> None:
        """Forward to ``inner``, which several facades can share, or to a new memory backend."""
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
        self.audit = self.audit_type(self.inner.audit, self)
        self.schedules = self.schedules_type(self.inner.schedules, self)
        self.dependencies = self.dependencies_type(self.inner.dependencies, self)
        self.listing = self.listing_type(self.inner.listing, self)
        self.streams = self.streams_type(self.inner.streams, self)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the memory backend."""
        return self.inner.capabilities

    def subscribe(self, keys: Iterable[str], consumer: str) -> FacadeSubscription:
        """Open a subscription and remember it for ``aclose``."""
        inner = self.inner.subscribe(keys, consumer)
        self.subscriptions.append(self.subscription_type(inner, self, consumer))
        return self.subscriptions[-1]

    def now(self) -> float:
        """Return the time of the memory backend."""
        return self.inner.now()

    async def health(self) -> Health:
        """Return the health of the memory backend."""
        return await self.inner.health()

    async def aclose(self) -> None:
        """Close the subscriptions opened here; the memory backend stays open."""
        for subscription in self.subscriptions:
            await subscription.close()


Broken = type[Facade | Part | FacadeSubscription]
"""class of a backend with a defect, or of a part with a defect"""
_PARTS: dict[str, type[Part | FacadeSubscription]] = {
    "publisher_type": FacadePublisher,
    "subscription_type": FacadeSubscription,
    "control_type": FacadeControl,
    "dead_letters_type": FacadeDeadLetters,
    "slots_type": FacadeSlots,
    "audit_type": FacadeAudit,
    "schedules_type": FacadeSchedules,
    "dependencies_type": FacadeDependencies,
    "listing_type": FacadeListing,
    "streams_type": FacadeStreams,
}


def backend_of(broken: Broken) -> type[Facade]:
    """Return a backend class: the class itself if it is a backend, otherwise a facade with this part."""
    if issubclass(broken, Facade):
        return broken
    (name,) = (name for name, part in _PARTS.items() if issubclass(broken, part))
    return type(broken.__name__, (Facade,), {name: broken})


class _LesserPublisher(FacadePublisher):
    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for check in field_checks(self.facade.capabilities):
            check(tasks)
        return await super().publish(*tasks)


class _LesserSchedules(FacadeSchedules):
    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        if Capability.UNIQUE not in self.facade.capabilities.names:
            reject_unique_keys([run.task for fire in fires for run in fire.runs])
        fired: tuple[Fired, ...] = await self.inner.fire(*fires)
        return fired


class _LesserControl(FacadeControl):
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        names = self.facade.capabilities.names
        checked_settings(
            settings,
            {Durability.MEMORY},
            flow=Capability.FLOW in names,
            fair_order=Capability.FAIR_ORDER in names,
            floor_share=Capability.FLOOR_SHARE in names,
            fan_out=Capability.FAN_OUT in names,
            listing=Capability.LISTING in names,
        )
        return await self.inner.configure(key, settings)


class Minimal(Facade):
    """A backend without any capability, except those that a subclass lists in ``names``."""

    names: frozenset[Capability] = frozenset()
    publisher_type = _LesserPublisher
    control_type = _LesserControl
    schedules_type = _LesserSchedules

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities listed in ``names``."""
        return Capabilities(names=self.names)


class Replicated(Facade):
    """A shared, durable backend: several facades use one memory backend, which outlives them."""

    @property
    def capabilities(self) -> Capabilities:
        """All capabilities, shared and durable."""
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
    """A backend without atomic retries: a retry is published first, and core acks the delivery afterwards."""

    publisher_type = _TwoStepPublisher
    subscription_type = _TwoStepSubscription

    @property
    def capabilities(self) -> Capabilities:
        """All capabilities except atomic retries."""
        return Capabilities(names=frozenset(Capability), atomic_retry=False)
