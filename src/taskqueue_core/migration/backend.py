"""Two backends as one, while everything moves from the old one to the new."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from msgspec import structs

from taskqueue_core.authoring.helpers import checked_keys
from taskqueue_core.backend import Backend, Capability, Publisher
from taskqueue_core.capabilities import (
    Control,
    DeadLetters,
    Maintained,
    QueueSettings,
    SlotPool,
    slots_of,
)
from taskqueue_core.composite.backend import Joint, Place, Plan, Side, shared_capabilities
from taskqueue_core.composite.control import JointControl, JointDeadLetters
from taskqueue_core.composite.subscription import JointSubscription
from taskqueue_core.errors import BackendUnavailable, CapabilityMissing, SettingsConflict
from taskqueue_core.limits import check_name
from taskqueue_core.migration.publisher import MigratingPublisher
from taskqueue_core.migration.routing import (
    MARKER,
    NEW,
    OLD,
    Crossing,
    Gates,
    MigrationMode,
    Phase,
    ours,
)
from taskqueue_core.tasks import Delivery, Health, Task

__all__ = ["MigratingBackend", "MigrationMode"]

T = TypeVar("T")

_MARKS = ("<old>", "<new>")
_LEISURE = 2.0
"""seconds for housekeeping and farewells on a side that can be done without"""
_CARED_FOR = 50
"""queues whose settings one pass of housekeeping compares"""


class MigratingBackend(Joint):
    """See `taskqueue_core.backend.Backend`. docs/migration.md tells what holds in which mode and phase.

    A receipt of the new side is told as it is and one of the old side with a mark before it, so that none is ever taken
    to the other, and so that the new side alone knows its own when the migration is over.

    Slots are the new side's from the start on, in every phase: endpoints are registered there anew, and a lease of the
    old side that is renewed here is made anew, as after the loss of a pool. Who still has the old side's pool in hand
    does not see what is held here: its servers may be busy more often, and say so.
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
        """Own both; each needs ``control``. In mode ``available`` the side that is left has ``patience`` seconds."""
        self._old, self._new = old, new
        self.sides = (Side(names[OLD], old), Side(names[NEW], new))
        self.crossing = Crossing(self.sides, mode, patience)
        self.capabilities = shared_capabilities([old, new])
        self.mode = mode
        self._gates = Gates(self.crossing)
        self._natives: dict[str, int] = {}
        self._subscriptions: set[JointSubscription] = set()
        self._publisher = MigratingPublisher(self.crossing, self)
        self._control = MigratingControl(self)

    @property
    def publisher(self) -> Publisher:
        """The one publisher."""
        return self._publisher

    @property
    def control(self) -> Control:
        """The operator's side, over both."""
        return self._control

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters of both."""
        if Capability.DEAD_LETTERS not in self.capabilities.names:
            raise CapabilityMissing("a side of the migration has no dead letters")
        return JointDeadLetters(self)

    @property
    def slots(self) -> SlotPool:
        """The slots of the new side; `CapabilityMissing` unless both have them."""
        if Capability.SLOTS not in self.capabilities.names:
            raise CapabilityMissing("a side of the migration has no slots")
        return slots_of(self._new)

    def subscribe(self, keys: Iterable[str], consumer: str) -> JointSubscription:
        """See `taskqueue_core.backend.Backend.subscribe`."""
        check_name("consumer", consumer)
        subscription = JointSubscription(self, checked_keys(keys), consumer)
        self._subscriptions = {one for one in self._subscriptions if not one.closed}
        self._subscriptions.add(subscription)
        return subscription

    def now(self) -> float:
        """Return the time of the new side."""
        return self._new.now()

    async def health(self) -> Health:
        """Ask both. Well is who can take in and give out."""
        old, new = await asyncio.gather(self._health(OLD), self._health(NEW))
        left = self.crossing.left
        well = [old.ok or left == OLD, new.ok or left == NEW]
        if self.mode is MigrationMode.STRICT:
            well = [old.ok, new.ok]
        details = {f"{name}_{k}": v for name, one in (("old", old), ("new", new))
                   for k, v in {"ok": one.ok, "backend": one.backend, **one.details}.items()}  # fmt: skip
        return Health(ok=all(well), backend=new.backend, details=details)

    async def _health(self, number: int) -> Health:
        side = self.sides[number]
        try:
            async with asyncio.timeout(_LEISURE if number == self.crossing.left else None):
                return await side.backend.health()
        except TimeoutError:
            return Health(ok=False, backend=side.name, details={"error": "no answer"})

    async def aclose(self) -> None:
        """Close every subscription and both sides."""
        for subscription in tuple(self._subscriptions):
            with contextlib.suppress(BackendUnavailable):  # what it has comes back by itself
                await subscription.close()
        await self._new.aclose()
        await self._old.aclose()

    # what the parts ask for

    async def places(self, key: str) -> Sequence[Place]:
        """Return the queue on both sides."""
        return (Place(OLD, key), Place(NEW, key))

    def outside(self, place: Place) -> str | None:
        """Return the name, which is the same on both sides."""
        return None if place.key == MARKER else place.key

    def first_plan(self, keys: tuple[str, ...]) -> Plan:
        """Receive from both in mode ``available``; in ``strict`` the stores must be asked first."""
        if self.mode is MigrationMode.STRICT:
            return Plan(())
        return Plan(tuple(Place(number, key) for number in (OLD, NEW) for key in keys))

    async def plan(self, keys: tuple[str, ...]) -> Plan:
        """See `Joint.plan`."""
        if self.mode is MigrationMode.STRICT:
            return await self._gates.plan(keys)
        return self.first_plan(keys)

    def in_turn(self) -> bool:
        """Sides take turns, unless the order counts."""
        return self.mode is MigrationMode.AVAILABLE

    def outward(self, side: int, delivery: Delivery) -> Delivery:
        """Mark a receipt."""
        receipt = delivery.receipt
        if side == OLD or receipt.startswith(_MARKS):
            return structs.replace(delivery, receipt=_MARKS[side] + receipt)
        return delivery

    def inward(self, delivery: Delivery) -> tuple[int, Delivery]:
        """Take the mark away."""
        for side, mark in enumerate(_MARKS):
            if delivery.receipt.startswith(mark):
                return side, structs.replace(delivery, receipt=delivery.receipt.removeprefix(mark))
        return self._natives.get(delivery.receipt, NEW), delivery

    def origins(self, receipt: str) -> Sequence[tuple[Place, str]]:
        """Say where a receipt is from; one without a mark may be the old side's, of before the migration."""
        for side, mark in enumerate(_MARKS):
            if receipt.startswith(mark):
                return [(Place(side, ""), receipt.removeprefix(mark))]
        return [(Place(NEW, ""), receipt), (Place(OLD, ""), receipt)]

    def adopted(self, side: int, receipt: str, delivery: Delivery) -> Delivery:
        """Return the delivery under the receipt that the worker knows."""
        if not receipt.startswith(_MARKS):
            self._natives[receipt] = side
        return structs.replace(delivery, receipt=receipt)

    def renamed(self, place: Place, task: Task) -> Task:  # noqa: ARG002 - names are the same on both sides
        """Return the task as it is."""
        return task

    async def at_leisure(self, side: Side, call: Callable[[], Awaitable[T]], otherwise: T) -> T:
        """Do without the side that is left, in mode ``available``."""
        if self.mode is MigrationMode.STRICT or side is not self.sides[self.crossing.left]:
            return await call()
        try:
            return await side.within(_LEISURE, call)
        except BackendUnavailable:
            return otherwise


class MigratingControl(JointControl):
    """The side that takes a queue's tasks in has its settings; the other one has a copy."""

    def __init__(self, backend: MigratingBackend) -> None:
        """Ask both sides of ``backend``."""
        super().__init__(backend)
        self._crossing = backend.crossing
        self._cared = itertools.count()

    async def settings(self, key: str) -> QueueSettings:
        """See `taskqueue_core.capabilities.Control.settings`."""
        _, found = await self._crossing.authority(key)
        return found.model_copy(update={"moved_to": None}) if ours(found) else found

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """See `taskqueue_core.capabilities.Control.configure`. Confirmed when both sides have them."""
        check_name("key", key)
        number, found = await self._crossing.authority(key)
        found.followed_by(settings)
        if ours(found):
            settings = settings.model_copy(update={"moved_to": found.moved_to})
        if await self._crossing.phase() is not Phase.IDLE:
            await self._crossing.mirror(key, settings, 1 - number)
        told = await self._crossing.sides[number].control.configure(key, settings)
        self._crossing.copied_to[key] = told.bound_to
        return told.model_copy(update={"moved_to": None}) if ours(told) else told

    async def maintain(self) -> Maintained:
        """See `taskqueue_core.capabilities.Control.maintain`. Closes what an old publisher has opened, too."""
        done = await super().maintain()
        with contextlib.suppress(BackendUnavailable, SettingsConflict, TimeoutError):
            async with asyncio.timeout(_LEISURE):  # the next pass goes on
                await self._care()
        return done

    async def _care(self) -> None:
        """Compare the settings of some queues on both sides, other ones each time."""
        if any(side.down_for for side in self._crossing.sides):
            return
        phase = await self._crossing.phase(fresh=True)
        if phase in (Phase.IDLE, Phase.TURNING):
            return
        keys = await self.queues()
        start = next(self._cared) * _CARED_FOR
        for key in keys[start : start + _CARED_FOR]:
            found = await self._crossing.read(key)
            if found.open_side != phase.towards:
                await self._crossing.turn(key, phase.towards)
            await self._crossing.mirror(key, found[phase.towards], 1 - phase.towards)
        if start + _CARED_FOR >= len(keys):
            self._cared = itertools.count()
