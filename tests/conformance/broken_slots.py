# ruff: noqa: D102 - each method replaces a documented method of the correct backend
"""Slot pools that each break one promise about who gets a slot."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from msgspec import structs

from taskqueue_core.capabilities import Endpoint, EndpointInfo, SlotLease
from taskqueue_memory.slots.leases import SlotPosition
from taskqueue_memory.slots.pool import MemorySlots
from taskqueue_memory.slots.transitions import Pool
from tests.conformance.facade import Facade, FacadeSlots

_FOR_EVER = 1e6


class _Acquiring(FacadeSlots):
    """A pool whose ``acquire`` calls ``take``, which subclasses override with a defect."""

    async def acquire(self, model: str, holder: str, **options: Any) -> tuple[SlotLease, ...]:
        return await self.take(model, holder, options)

    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        """Return the slots that the correct pool grants."""
        return await self.inner.acquire(model, holder, **options)


class GrantsTwice(_Acquiring):
    """Defect: if no slot is free, a lease of another holder is granted a second time."""

    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options)
        places = self.pool.models.get(model, {}).values()
        held = [lease.to_slot_lease() for place in places for lease in place.leases.values()]
        return given or tuple(held[: options.get("limit", 1)])


class ChecksThenTakes(_Acquiring):
    """Defect: between finding free slots and taking them, other calls can take the same slots."""

    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        now, free = self.facade.now(), []
        for place in self.pool.models.get(model, {}).values():
            free += [place] * max(0, int(place.room))
        await asyncio.sleep(0)
        free = free[: options.get("limit", 1)]
        return tuple(
            self.pool.grant(one, holder, now, options["ttl"]).to_slot_lease() for one in free
        )


class LosesSlotsOnCancel(_Acquiring):
    """Defect: a cancelled ``acquire`` leaves its slot leased for ever, because the real lease time is set too late."""

    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options | {"ttl": _FOR_EVER})
        await asyncio.sleep(0)
        for lease in given:
            self.pool.expire_at(self.pool.leases[lease.token], self.facade.now() + options["ttl"])
        return given


class TakesTheBusy(_Acquiring):
    """Defect: acquiring idle slots also ends leases of running jobs."""

    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options)
        if options.get("idle") is None or len(given) >= options["limit"]:
            return given
        for place in self.pool.models[model].values():
            for lease in place.with_job:
                self.pool.end(lease)
        return given


class _Upside(SlotPosition):
    __slots__ = ()

    def merit(self) -> tuple[int, bool, int, int]:
        priority, *rest = super().merit()
        return (-priority, *rest)  # type: ignore[return-value]


class _Anywhere(SlotPosition):
    __slots__ = ()

    def merit(self) -> tuple[int, bool, int, int]:
        priority, _, held, number = super().merit()
        return (priority, False, held, number)


class _Careless(SlotPosition):
    __slots__ = ()

    def may_give(self, now: float) -> bool:
        return self.healthy and self.rests_until <= now


class _Restless(SlotPosition):
    __slots__ = ()

    def may_give(self, now: float) -> bool:
        self.rests_until = -math.inf
        return super().may_give(now)


class _Alone(SlotPosition):
    __slots__ = ()

    @property
    def room(self) -> float:
        return self.endpoint.slots - len(self.leases)


class _Trusting(SlotPosition):
    __slots__ = ()

    @property
    def healthy(self) -> bool:
        return True


class _PlacesOf(FacadeSlots):
    """A pool whose endpoints are instances of a defective class, which subclasses name."""

    kind: type[SlotPosition]

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        await self.inner.register(endpoint)
        place = self.pool.models[endpoint.model][endpoint.server]
        place.__class__ = self.kind
        return place.info(self.facade.now())


class InvertedEndpoints(_PlacesOf):
    """Defect: the endpoint with the lowest priority is chosen first."""

    kind = _Upside


class ForgetsWhatIsLoaded(_PlacesOf):
    """Defect: choosing an endpoint ignores which model its server ran last."""

    kind = _Anywhere


class GivesTheDraining(_PlacesOf):
    """Defect: endpoints that are draining or removed get jobs."""

    kind = _Careless


class GivesTheResting(_PlacesOf):
    """Defect: an endpoint that must rest gets jobs as soon as a slot is requested."""

    kind = _Restless


class IgnoresTogether(_PlacesOf):
    """Defect: the limit of a server ignores the slots of its other models."""

    kind = _Alone


class GivesTheUnseen(_PlacesOf):
    """Defect: every endpoint is treated as healthy."""

    kind = _Trusting


class LowersByForce(FacadeSlots):
    """Defect: reducing the slots of an endpoint ends the leases above the new number."""

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        await self.inner.register(endpoint)
        place = self.pool.models[endpoint.model][endpoint.server]
        for lease in tuple(place.leases.values())[endpoint.slots :]:
            self.pool.end(lease)
        return place.info(self.facade.now())


class _Hoard(Pool):
    def clear(self, place: SlotPosition) -> None:
        """Do nothing instead of ending the leases without a job."""


class KeepsTheUnused(FacadeSlots):
    """Defect: at an endpoint that must not get jobs, leases that wait for a job are kept."""

    def __init__(self, inner: MemorySlots, facade: Facade) -> None:
        super().__init__(inner, facade)
        self.pool.__class__ = _Hoard


class _SweepsAll(Pool):
    def clear(self, place: SlotPosition) -> None:
        """End all leases, also those with a job."""
        for lease in tuple(place.leases.values()):
            self.end(lease)


class EndsTheUsed(FacadeSlots):
    """Defect: at an endpoint that must not get jobs, leases of running jobs are ended."""

    def __init__(self, inner: MemorySlots, facade: Facade) -> None:
        super().__init__(inner, facade)
        self.pool.__class__ = _SweepsAll


class SplitsNames(_Acquiring):
    """Defect: the name of a server is cut at its first dash."""

    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options)
        return tuple(structs.replace(one, server=one.server.split("-")[0]) for one in given)
