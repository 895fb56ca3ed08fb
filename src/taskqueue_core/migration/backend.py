"""The backend of a running migration: it presents the old and the new backend as one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from msgspec import structs

from taskqueue_core.authoring.helpers import checked_keys
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.composite.backend import CompositeBackend, Member, QueuePart, ReceivePlan
from taskqueue_core.composite.control import JointControl
from taskqueue_core.composite.dependencies import JointDependencies
from taskqueue_core.composite.listing import JointListing
from taskqueue_core.composite.streams import JointStreams
from taskqueue_core.composite.subscription import JointSubscription
from taskqueue_core.limits import check_name
from taskqueue_core.migration.publisher import MigratingPublisher
from taskqueue_core.migration.routing import (
    MARKER,
    NEW,
    OLD,
    MigrationMode,
    MigrationPhase,
    MigrationRouter,
    only_open_side,
    ours,
)
from taskqueue_core.migration.schedules import MigratingSchedules
from taskqueue_core.tasks import Delivery, Health

_MARKS = ("<old>", "<new>")
_LEISURE = 2.0
"""seconds after which a health check of the backend that is being drained, or a repair of settings, times out"""
_REPAIRED = 50
"""maximum number of queues whose settings one maintenance pass compares and repairs"""


class MigratingBackend(CompositeBackend):
    """A `Backend` that migrates queues from one backend to another; docs/migration.md describes its modes and phases.

    It owns the two backends, which must both support ``control``. In mode ``available``, calls to the backend that is
    being drained time out after ``patience`` seconds.

    Receipts of the new backend are passed on unchanged, and receipts of the old backend with a prefix. So no receipt is
    sent to the wrong backend, and the new backend still knows its own receipts after the migration.

    Slots always come from the new backend: endpoints are registered there again, and a lease of the old backend is
    recreated there when it is renewed, as if the pool had been lost. A process that still uses the old backend's pool
    does not see these leases, so its jobs may be sent to GPU servers that are already busy.
    """

    def __init__(
        self,
        old: Backend,
        new: Backend,
        *,
        mode: MigrationMode = MigrationMode.AVAILABLE,
        names: tuple[str, str] = ("old", "new"),
        patience: float = 0.5,
    ) -> None:
        members = Member(names[OLD], old), Member(names[NEW], new)
        super().__init__(*members)
        self.router = MigrationRouter(members, mode, patience)
        self.mode = mode
        self.in_turn = mode is MigrationMode.AVAILABLE
        self._natives: dict[str, int] = {}
        self.publisher = MigratingPublisher(self, self.router)
        self.control = MigratingControl(self)

    @property
    def dependencies(self) -> JointDependencies:
        """The lines within and between both sides. Raises `CapabilityMissing` unless both sides support them."""
        return JointDependencies(self)

    @property
    def listing(self) -> JointListing:
        """The lists of both sides. Raises `CapabilityMissing` unless both sides support them."""
        return JointListing(self)

    @property
    def schedules(self) -> MigratingSchedules:
        """The schedules of both sides. Raises `CapabilityMissing` unless both sides support them."""
        return MigratingSchedules(self, self.router)

    @property
    def streams(self) -> JointStreams:
        """The events of all tasks. Raises `CapabilityMissing` unless all members support them."""
        return JointStreams(self)

    def subscribe(self, keys: Iterable[str], consumer: str) -> JointSubscription:
        check_name("consumer", consumer)
        return JointSubscription(self, checked_keys(keys), consumer)

    async def health(self) -> Health:
        """Return the joint health of both sides. In mode ``available``, the drained side may be unhealthy."""
        old, new = await asyncio.gather(self._health(OLD), self._health(NEW))
        ok = all(side.ok or self.router.is_optional(n) for n, side in enumerate((old, new)))
        details = {f"{name}_{k}": v for name, health in (("old", old), ("new", new))
                   for k, v in {"ok": health.ok, "backend": health.backend, **health.details}.items()}  # fmt: skip
        return Health(ok=ok, backend=new.backend, details=details)

    async def _health(self, number: int) -> Health:
        member = self.members[number]
        try:
            async with asyncio.timeout(_LEISURE if number == self.router.old_member else None):
                return await member.backend.health()
        except TimeoutError:
            return Health(ok=False, backend=member.name, details={"error": "no answer"})

    async def parts(self, key: str) -> Sequence[QueuePart]:
        return (QueuePart(OLD, key), QueuePart(NEW, key))

    def public_key(self, part: QueuePart) -> str | None:
        return None if part.key == MARKER else part.key

    def first_plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        """Return the queues of both backends, or no queues in mode ``strict``, where the plan depends on the stores."""
        if self.mode is MigrationMode.STRICT:
            return ReceivePlan(())
        return ReceivePlan(tuple(QueuePart(number, key) for number in (OLD, NEW) for key in keys))

    async def plan(self, keys: tuple[str, ...]) -> ReceivePlan:
        if self.mode is MigrationMode.STRICT:
            return await self.router.strict_plan(keys)
        return self.first_plan(keys)

    def from_member(self, member: int, delivery: Delivery) -> Delivery:
        """Add a prefix to the receipt if the old backend issued it, or if the receipt itself begins with a prefix."""
        receipt = delivery.receipt
        if member == OLD or receipt.startswith(_MARKS):
            return structs.replace(delivery, receipt=_MARKS[member] + receipt)
        return delivery

    def origins(self, receipt: str, key: str) -> Sequence[tuple[QueuePart, str]]:
        for member, mark in enumerate(_MARKS):
            if receipt.startswith(mark):
                return [(QueuePart(member, key), receipt.removeprefix(mark))]
        # A receipt without a prefix may also be from the old side, if it was issued before the migration.
        first = self._natives.get(receipt, NEW)
        return [(QueuePart(member, key), receipt) for member in (first, 1 - first)]

    def adopted(self, member: int, receipt: str, delivery: Delivery) -> Delivery:
        """Return an adopted delivery with the receipt that the worker has, and remember which side issued it."""
        if not receipt.startswith(_MARKS):
            self._natives[receipt] = member
        return super().adopted(member, receipt, delivery)

    def is_optional(self, member: Member) -> bool:
        return self.router.is_optional(self.members.index(member))


class MigratingControl(JointControl):
    """The ``control`` of both backends.

    The side that accepts a queue's tasks holds the queue's settings. The other side has a copy.
    """

    def __init__(self, backend: MigratingBackend) -> None:
        super().__init__(backend)
        self._router = backend.router

    async def settings(self, key: str) -> QueueSettings:
        _, settings = await self._router.authority(key)
        return settings.model_copy(update={"moved_to": None}) if ours(settings) else settings

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Replace the settings of a queue; once the migration has started, on both backends."""
        check_name("key", key)
        number, result = await self._router.authority(key)
        result.followed_by(settings)
        if ours(result):
            settings = settings.model_copy(update={"moved_to": result.moved_to})
        if await self._router.phase() is not MigrationPhase.IDLE:
            await self._router.mirror(key, settings, 1 - number)
        results = await self._router.members[number].control.configure(key, settings)
        self._router.copied_to[key] = results.bound_to
        return results.model_copy(update={"moved_to": None}) if ours(results) else results

    async def _repair(self) -> None:
        if any(member.down_for for member in self._router.members):
            return
        async with asyncio.timeout(_LEISURE):
            phase = await self._router.phase(fresh=True)
            if phase in (MigrationPhase.IDLE, MigrationPhase.INTERRUPTED):
                return
            for key in self._next_keys(await self.queues(), _REPAIRED):
                members = await self._router.read(key)
                if only_open_side(members) != phase.towards:
                    await self._router.turn(key, phase.towards)
                await self._router.mirror(key, members[phase.towards], 1 - phase.towards)
