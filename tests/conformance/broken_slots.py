"""Backends that break one promise each about who gets a slot."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from msgspec import structs

from taskqueue_core.capabilities import Endpoint, EndpointInfo, SlotLease
from taskqueue_memory.leases import Place
from taskqueue_memory.pool import Pool
from taskqueue_memory.slots import MemorySlots
from tests.conformance.facade import Facade, FacadeSlots

_FOR_EVER = 1e6


class _Acquiring(FacadeSlots):
    """Passes an ``acquire`` on by a method that a subclass breaks."""

    async def acquire(self, model: str, holder: str, **options: Any) -> tuple[SlotLease, ...]:
        return await self.take(model, holder, options)

    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        """Pass on."""
        return await self.inner.acquire(model, holder, **options)


# Who gets a slot


class _GrantsTwice(_Acquiring):
    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options)
        places = self.pool.models.get(model, {}).values()
        held = [lease.told() for place in places for lease in place.leases.values()]
        return given or tuple(held[: options.get("limit", 1)])


class GrantsTwice(Facade):
    """Where no slot is free it gives one that has a holder."""

    slots_type = _GrantsTwice


class _ChecksThenTakes(_Acquiring):
    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        now, free = self.facade.now(), []
        for place in self.pool.models.get(model, {}).values():
            free += [place] * max(0, int(place.room))
        await asyncio.sleep(0)
        free = free[: options.get("limit", 1)]
        return tuple(self.pool.grant(one, holder, now, options["ttl"]).told() for one in free)


class ChecksThenTakes(Facade):
    """It looks for free slots first and takes them later, when they may be others'."""

    slots_type = _ChecksThenTakes


class _LosesOnCancel(_Acquiring):
    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options | {"ttl": _FOR_EVER})
        await asyncio.sleep(0)
        for lease in given:
            self.pool.keep(self.pool.leases[lease.token], self.facade.now() + options["ttl"])
        return given


class LosesSlotsOnCancel(Facade):
    """A slot is taken for ever first, and for its ttl later."""

    slots_type = _LosesOnCancel


class _TakesTheBusy(_Acquiring):
    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options)
        if options.get("idle") is None or len(given) >= options["limit"]:
            return given
        for place in self.pool.models[model].values():
            for lease in place.with_job:
                self.pool.end(lease)
        return given


class TakesTheBusy(Facade):
    """Who asks for idle slots gets those of running jobs."""

    slots_type = _TakesTheBusy


class _Upside(Place):
    __slots__ = ()

    def merit(self) -> tuple[int, bool, int, int]:
        priority, *rest = super().merit()
        return (-priority, *rest)  # type: ignore[return-value]


class _Anywhere(Place):
    __slots__ = ()

    def merit(self) -> tuple[int, bool, int, int]:
        priority, _, held, number = super().merit()
        return (priority, False, held, number)


class _Careless(Place):
    __slots__ = ()

    def may_give(self, now: float) -> bool:
        return self.healthy and self.rests_until <= now


class _Restless(Place):
    __slots__ = ()

    def may_give(self, now: float) -> bool:
        self.rests_until = -math.inf
        return super().may_give(now)


class _Alone(Place):
    __slots__ = ()

    @property
    def room(self) -> float:
        return self.endpoint.slots - len(self.leases)


class _Trusting(Place):
    __slots__ = ()

    @property
    def healthy(self) -> bool:
        return True


class _PlacesOf(FacadeSlots):
    """Registers endpoints that are another kind of place."""

    kind: type[Place]

    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        await self.inner.register(endpoint)
        place = self.pool.models[endpoint.model][endpoint.server]
        place.__class__ = self.kind
        return place.told(self.facade.now())


class _UpsidePlaces(_PlacesOf):
    kind = _Upside


class InvertedEndpoints(Facade):
    """The endpoint of the lowest priority comes first."""

    slots_type = _UpsidePlaces


class _AnywherePlaces(_PlacesOf):
    kind = _Anywhere


class ForgetsWhatIsLoaded(Facade):
    """It does not matter which model a server was given last."""

    slots_type = _AnywherePlaces


class _CarelessPlaces(_PlacesOf):
    kind = _Careless


class GivesTheDraining(Facade):
    """Endpoints that drain, or are removed, get jobs."""

    slots_type = _CarelessPlaces


class _RestlessPlaces(_PlacesOf):
    kind = _Restless


class GivesTheResting(Facade):
    """A rest ends when somebody wants a slot."""

    slots_type = _RestlessPlaces


class _AlonePlaces(_PlacesOf):
    kind = _Alone


class IgnoresTogether(Facade):
    """Models know nothing of the others of their server."""

    slots_type = _AlonePlaces


class _TrustingPlaces(_PlacesOf):
    kind = _Trusting


class GivesTheUnseen(Facade):
    """Every endpoint is healthy."""

    slots_type = _TrustingPlaces


class _LowersByForce(FacadeSlots):
    async def register(self, endpoint: Endpoint) -> EndpointInfo:
        await self.inner.register(endpoint)
        place = self.pool.models[endpoint.model][endpoint.server]
        for lease in tuple(place.leases.values())[endpoint.slots :]:
            self.pool.end(lease)
        return place.told(self.facade.now())


class LowersByForce(Facade):
    """Slots that are taken away are taken from their holders."""

    slots_type = _LowersByForce


class _Hoard(Pool):
    def clear(self, place: Place) -> None:
        """Do nothing."""


class _KeepsTheUnused(FacadeSlots):
    def __init__(self, inner: MemorySlots, facade: Facade) -> None:
        super().__init__(inner, facade)
        self.pool.__class__ = _Hoard


class KeepsTheUnused(Facade):
    """Slots that wait for their jobs are kept where no jobs may go."""

    slots_type = _KeepsTheUnused


class _SweepsAll(Pool):
    def clear(self, place: Place) -> None:
        """End what has a job, too."""
        for lease in tuple(place.leases.values()):
            self.end(lease)


class _EndsTheUsed(FacadeSlots):
    def __init__(self, inner: MemorySlots, facade: Facade) -> None:
        super().__init__(inner, facade)
        self.pool.__class__ = _SweepsAll


class EndsTheUsed(Facade):
    """Where no jobs may go those that run lose their slots."""

    slots_type = _EndsTheUsed


class _SplitsNames(_Acquiring):
    async def take(self, model: str, holder: str, options: dict[str, Any]) -> tuple[SlotLease, ...]:
        given = await super().take(model, holder, options)
        return tuple(structs.replace(one, server=one.server.split("-")[0]) for one in given)


class SplitsNames(Facade):
    """A server is called what comes before the first dash."""

    slots_type = _SplitsNames
