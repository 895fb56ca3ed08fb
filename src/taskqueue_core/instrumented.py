"""The wrapper around a backend. It calls hooks, records spans and metrics, and refuses unsupported fields of tasks.

A hook is called, and a span recorded, once per batch. Without plugins and OpenTelemetry, calls are only checked
and passed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from taskqueue_core import telemetry
from taskqueue_core.authoring.helpers import (
    SubscriptionBase,
)
from taskqueue_core.authoring.schedule_steps import result_of
from taskqueue_core.authoring.unsupported import field_checks
from taskqueue_core.backend import Backend, Capabilities, Publisher, Subscription
from taskqueue_core.capabilities import (
    Audit,
    Control,
    DeadLettering,
    DeadLetters,
    Dependencies,
    Fire,
    Fired,
    Handover,
    HasAudit,
    HasControl,
    HasDeadLetters,
    HasDependencies,
    HasListing,
    HasSchedules,
    HasSlots,
    HasStreams,
    Listing,
    LongPolling,
    Maintained,
    QueueSettings,
    Revocation,
    RoomSignals,
    Schedules,
    SlotPool,
    Streams,
)
from taskqueue_core.capabilities.schedules import OVERLAP
from taskqueue_core.errors import LeaseLost
from taskqueue_core.hooks import Hooks
from taskqueue_core.retry import Bury
from taskqueue_core.shard_guard import ShardGuard, reject_shards
from taskqueue_core.tasks import (
    Confirmation,
    Delivery,
    Health,
    Received,
    Refusal,
    Settled,
    Task,
)

_LOST_TOO_OFTEN = Bury("max_losses_exceeded", None)
_STALE = (Settled.LEASE_LOST,)
"""the outcome reported to hooks when the wrapped backend raises `LeaseLost`, because the only receipt was stale"""


class InstrumentedBackend:
    """A backend with hooks and telemetry. It refuses fields of tasks that the wrapped backend does not support."""

    def __init__(self, inner: Backend, hooks: Hooks, guard: ShardGuard | None = None) -> None:
        """Wrap ``inner``, which is closed together with the wrapper. A process without sharding passes a ``guard``."""
        self.inner = inner
        """the wrapped backend, for calls of methods that belong neither to the contract nor to a capability"""
        self.hooks = hooks
        self.publisher: Publisher = InstrumentedPublisher(inner, hooks, guard)
        self._guard = guard

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def control(self) -> Control:
        """The ``control`` of the wrapped backend, with hooks for maintenance."""
        return InstrumentedControl(cast("HasControl", self.inner).control, self.hooks, self._guard)

    @property
    def dead_letters(self) -> DeadLetters:
        return cast("HasDeadLetters", self.inner).dead_letters

    @property
    def dependencies(self) -> Dependencies:
        return cast("HasDependencies", self.inner).dependencies

    @property
    def slots(self) -> SlotPool:
        return cast("HasSlots", self.inner).slots

    @property
    def listing(self) -> Listing:
        return cast("HasListing", self.inner).listing

    @property
    def audit(self) -> Audit:
        return cast("HasAudit", self.inner).audit

    @property
    def schedules(self) -> Schedules:
        """The ``schedules`` of the wrapped backend, with hooks for the tasks that they publish."""
        return InstrumentedSchedules(cast("HasSchedules", self.inner).schedules, self.hooks)

    @property
    def streams(self) -> Streams:
        return cast("HasStreams", self.inner).streams

    @property
    def workflows(self) -> object:
        """The workflows of a server, if the wrapped backend is one; otherwise ``None``."""
        return getattr(self.inner, "workflows", None)

    @property
    def fault(self) -> str | None:
        """Why this process must be restarted with other settings; ``None`` if there is no reason."""
        return None if self._guard is None or self._guard.fault is None else str(self._guard.fault)

    async def check_store(self) -> None:
        """Raise `ConfigurationError` if the store has sharded queues and this process does not support them."""
        if self._guard is not None:
            await self._guard.check()

    def subscribe(self, keys: Iterable[str], consumer: str) -> Subscription:
        inner = self.inner.subscribe(keys, consumer)
        return InstrumentedSubscription(inner, consumer, self.hooks, self._guard)

    def now(self) -> float:
        return self.inner.now()

    async def health(self) -> Health:
        return await self.inner.health()

    async def aclose(self) -> None:
        await self.inner.aclose()


class InstrumentedPublisher:
    """A publisher with hooks and telemetry. It has the method `room_signal` if the wrapped publisher has it."""

    def __init__(self, backend: Backend, hooks: Hooks, guard: ShardGuard | None) -> None:
        inner = backend.publisher
        self._inner = inner
        self._hooks = hooks
        self._guard = guard
        self._checks = field_checks(backend.capabilities)
        if hasattr(inner, "room_signal"):
            self.room_signal = cast("RoomSignals", inner).room_signal

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        for check in self._checks:
            check(tasks)
        guard = self._guard
        if guard is not None and not guard.checked:
            await guard.check()
        if telemetry.active():
            with telemetry.publishing(tasks) as carrying:
                confirmations = await self._inner.publish(*carrying)
            tasks = carrying
        else:
            confirmations = await self._inner.publish(*tasks)
        if self._hooks.listening:
            self._hooks.fire("published", tasks=tasks, confirmations=confirmations)
        if guard is not None:
            for confirmation in confirmations:
                if confirmation.code is Refusal.MOVED:
                    await guard.check_refused(confirmations)
                    break
        return confirmations

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,
        traceback: str | None = None,
    ) -> Confirmation:
        call = self._inner.schedule_retry(
            task,
            at,
            error=error,
            token=token,
            settles=settles,
            free=free,
            traceback=traceback,
        )
        if telemetry.active():
            with telemetry.operation("retry", (task,)):
                confirmation = await call
        else:
            confirmation = await call
        if self._hooks.listening:
            self._hooks.fire(
                "retry_scheduled",
                task=task,
                at=at,
                error=error,
                confirmation=confirmation,
                settles=settles,
            )
        return confirmation


class InstrumentedSubscription(SubscriptionBase):
    """A subscription with hooks and telemetry. It has `adopt` and `revoked` if the wrapped subscription has them."""

    def __init__(
        self, inner: Subscription, consumer: str, hooks: Hooks, guard: ShardGuard | None
    ) -> None:
        self._inner = inner
        self._consumer = consumer
        self._hooks = hooks
        self._guard = guard
        if hasattr(inner, "adopt"):
            self.adopt = cast("Handover", inner).adopt
        if hasattr(inner, "revoked"):
            self.revoked = cast("Revocation", inner).revoked

    async def receive(self, limit: int, timeout: float | None) -> Received:
        if self._guard is not None and not self._guard.checked:
            await self._guard.check()
        if telemetry.active():
            with telemetry.operation("receive") as operation:
                received = await self._inner.receive(limit, timeout)
                if operation is not None:
                    operation.tasks = _tasks(received.deliveries)
        else:
            received = await self._inner.receive(limit, timeout)
        if self._hooks.listening:
            if received.deliveries:
                self._hooks.fire(
                    "delivered", deliveries=received.deliveries, consumer=self._consumer
                )
            if received.expired:
                self._hooks.fire("expired", tasks=received.expired)
        return received

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        try:
            if telemetry.active():
                with telemetry.operation("ack", _tasks(deliveries)):
                    outcomes = await self._inner.ack(*deliveries, results=results)
            else:
                outcomes = await self._inner.ack(*deliveries, results=results)
        except LeaseLost:
            self._hooks.fire("settled", deliveries=deliveries, verb="ack", outcomes=_STALE)
            raise
        if self._hooks.listening:
            self._hooks.fire("settled", deliveries=deliveries, verb="ack", outcomes=outcomes)
        return outcomes

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        verb = "lost" if lost else "redeliver"
        try:
            with telemetry.operation(verb, _tasks(deliveries)):
                outcomes = await self._inner.redeliver(*deliveries, lost=lost)
        except LeaseLost:
            self._hooks.fire("settled", deliveries=deliveries, verb=verb, outcomes=_STALE)
            raise
        self._hooks.fire("settled", deliveries=deliveries, verb=verb, outcomes=outcomes)
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            if outcome is Settled.DEAD:
                self._hooks.fire("dead_lettered", delivery=delivery, verdict=_LOST_TOO_OFTEN)
        return outcomes

    async def dead_letter(
        self,
        delivery: Delivery,
        reason: str,
        error: str | None = None,
        traceback: str | None = None,
    ) -> Settled:
        with telemetry.operation("dead_letter", (delivery.task,)):
            inner = cast("DeadLettering", self._inner)
            outcome = await inner.dead_letter(delivery, reason, error, traceback)
        self._hooks.fire("dead_lettered", delivery=delivery, verdict=Bury(reason, error))
        return outcome

    async def close(self) -> None:
        await self._inner.close()


def _tasks(deliveries: Sequence[Delivery]) -> list[Task]:
    return [delivery.task for delivery in deliveries]


class InstrumentedSchedules:
    """A ``schedules`` that fires the hooks of published tasks and of skipped instants."""

    def __init__(self, inner: Schedules, hooks: Hooks) -> None:
        self._inner = inner
        self._hooks = hooks
        self.put = inner.put
        self.get = inner.get
        self.list = inner.list
        self.delete = inner.delete
        self.due = inner.due
        self.signal = inner.signal
        # The methods of `taskqueue_core.queue_schedules.ServedSchedules`, which only some have.
        for name in ("set_paused", "run_schedule"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    async def fire(self, *fires: Fire) -> tuple[Fired, ...]:
        done = await self._inner.fire(*fires)
        for fire, fired in zip(fires, done, strict=True):
            for reason, count in _skipped(fire, fired).items():
                names = {"key": fire.key, "name": fire.name}
                self._hooks.fire("schedule_skipped", **names, reason=reason, count=count)
            if fired.confirmations:
                tasks = [run.task for run in fire.runs[: len(fired.confirmations)]]
                self._hooks.fire("published", tasks=tasks, confirmations=fired.confirmations)
        return done


def _skipped(fire: Fire, fired: Fired) -> Counter[str]:
    """Return for how many instants a step published no task, by reason."""
    results = [result_of(confirmation) for confirmation in fired.confirmations]
    unchanged = fired.stale or (results and results[0] is None)
    if unchanged or fire.planned_for is None:
        return Counter()
    found = Counter({skip.reason: skip.count for skip in fire.skipped})
    found.update(result for result in results if result in (OVERLAP, Refusal.NOT_UNIQUE))
    return found


class InstrumentedControl:
    """A ``control`` that fires hooks after maintenance. With a ``guard``, it rejects settings with several shards."""

    def __init__(self, inner: Control, hooks: Hooks, guard: ShardGuard | None) -> None:
        self._inner = inner
        self._hooks = hooks
        self._guard = guard
        self.queues = inner.queues
        self.settings = inner.settings
        self.ledger = inner.ledger
        self.stats = inner.stats
        self.statuses = inner.statuses
        self.results = inner.results
        self.progress = inner.progress
        self.cancel = inner.cancel
        self.reschedule = inner.reschedule
        self.purge = inner.purge
        self.delete = inner.delete
        self.workers = inner.workers
        if isinstance(inner, LongPolling):
            self.wait_for_end = inner.wait_for_end

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        if self._guard is not None:
            reject_shards(key, settings)
        return await self._inner.configure(key, settings)

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
        if self._guard is not None:
            await self._guard.check_again()
        return done
