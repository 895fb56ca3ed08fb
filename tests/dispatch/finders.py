"""A slot finder for tests, which also hands out free slots as the dispatcher's queue runner does."""

from __future__ import annotations

from typing import Any, cast

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import SlotPool, slots_of
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.lease_renewal import LeaseRenewer
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_dispatch.slot_finder import (
    FoundLeased,
    FoundNone,
    FoundQueued,
    SlotFinder,
    SlotPermit,
)
from taskqueue_dispatch.submit import Reason
from taskqueue_dispatch.wait_queue import SlotWaiters
from tests.dispatch.desk import URL, Failing, Servers, free, registry_of, settings, well


class Desk:
    """A slot finder in one process.

    `serve` gives free slots to waiting callers, as the dispatcher's queue runner does.
    """

    def __init__(
        self, backend: Backend, registry: ModelRegistry, options: DispatchSettings
    ) -> None:
        """Create the finder, with no caller waiting for a slot."""
        self.backend = backend
        self.registry = registry
        self.pool: SlotPool = slots_of(backend)
        self.failing = Failing(self.pool)
        self.kept: list[SlotPermit] = []
        pool = cast("Any", self.failing)
        self.renewer = LeaseRenewer(pool, registry, Servers(), options)
        self.waiters = SlotWaiters(registry)
        self.finder = SlotFinder(pool, registry, self.renewer, self.waiters, options, holder="me")

    async def find(self, model: str = "flux", **more: Any) -> FoundLeased | FoundQueued | FoundNone:
        """Call `SlotFinder.find_endpoint`."""
        return await self.finder.find_endpoint(model, **more)

    async def permit(self, model: str = "flux", **more: Any) -> SlotPermit:
        """Find an endpoint that has a free slot, and return the permit."""
        found = await self.find(model, **more)
        assert isinstance(found, FoundLeased)
        return found.permit

    async def permit_kept(self) -> None:
        """Acquire a permit, and keep a reference so that it is not released."""
        self.kept.append(await self.permit())

    async def place(self, model: str = "flux", **more: Any) -> FoundQueued:
        """Return a place in the waiting line; there must be no free slot."""
        found = await self.find(model, **more)
        assert isinstance(found, FoundQueued)
        return found

    async def serve(self, model: str = "flux") -> int:
        """Give free slots to waiting callers, as the queue runner does; return how many callers got a slot."""
        given = 0
        while wanted := self.waiters.wanting(model):
            leases = await self.pool.acquire(model, "me", ttl=60, limit=wanted)
            if not leases:
                break
            for lease in leases:
                held = self.renewer.hold(lease)
                if self.waiters.give(model, held):
                    given += 1
                else:
                    self.renewer.drop(held)
                    await self.pool.release(lease)
        return given


async def desk_of(
    backend: Backend,
    slots: int = 1,
    config: ModelConfig | None = None,
    model: str = "flux",
    **more: Any,
) -> Desk:
    """Return a desk whose model has one healthy endpoint."""
    options = settings(find_timeout=60, **more)
    registry = await registry_of(backend)
    if config is not None:
        await registry.configure(model, config)
    await registry.register(model, "a", URL, slots)
    await well(backend, model, "a")
    await registry.refresh()
    return Desk(backend, registry, options)


async def awaited(place: FoundQueued) -> SlotPermit:
    """Await the permit in a coroutine, so that it can run as an asyncio task."""
    return await place


async def is_free(desk: Desk, number: int) -> bool:
    """Return whether the model "flux" has exactly ``number`` free slots."""
    return await free(desk.pool, "flux") == number


async def reason(desk: Desk, tenant: str) -> Reason | None:
    """Return why a request of this tenant is refused; ``None`` if it is accepted."""
    found = await desk.find(tenant=tenant)
    return found.reason if isinstance(found, FoundNone) else None
