"""A lease renewer for tests, on a backend whose clock moves only when the test moves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import slots_of
from taskqueue_core.clock import ManualClock
from taskqueue_dispatch.lease_renewal import LeaseRenewer, RenewedLease
from taskqueue_dispatch.registry import ModelRegistry
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import URL, Failing, Servers, settings, well

LEASE = 300.0
HOUR = 3600.0


class Desk:
    """A lease renewer on a memory backend with a manual clock; calls to its slot pool can be made to fail."""

    def __init__(self) -> None:
        """Create the renewer, with no endpoint registered."""
        self.clock = ManualClock()
        self.backend = MemoryBackend(clock=self.clock)
        self.pool = Failing(self.backend.slots)
        self.servers = Servers()
        self.settings = settings(lease=LEASE, health_interval=10, settled=5)
        self.registry = ModelRegistry(self.backend, self.settings)
        self.renewer = LeaseRenewer(
            cast("Any", self.pool),
            self.registry,
            self.servers,
            self.settings,
            monotonic=self.clock.now,
            uniform=lambda: 0.5,
        )

    async def take(
        self, number: int = 1, *, model: str = "flux", reports: bool = True
    ) -> list[RenewedLease]:
        """Register a healthy server with ``number`` slots, acquire all of them, and return the leases."""
        await self.registry.register(model, "a", URL, number, reports=reports)
        await well(self.backend, model, "a")
        leases = await self.backend.slots.acquire(model, "me", ttl=LEASE, limit=number)
        assert len(leases) == number
        return [self.renewer.hold(lease) for lease in leases]

    async def assign(self, held: RenewedLease, job: str) -> None:
        """Assign a job to a leased slot."""
        (lease,) = await self.backend.slots.assign((held.lease, job), ttl=LEASE)
        assert lease is not None
        self.renewer.change(held, lease)

    async def check(self) -> None:
        """Run all health checks that are due."""
        for info, config, watch in self.renewer.checks.due():
            await self.renewer.checks.check(info, config, watch)

    async def healthy(self, server: str = "a") -> bool:
        """Return whether the slot pool considers the server healthy."""
        infos = (await self.backend.slots.inspect()).endpoints
        return next(info.healthy for info in infos if info.endpoint.server == server)


@asynccontextmanager
async def running(renewer: LeaseRenewer) -> AsyncIterator[asyncio.Task[None]]:
    """Run the renewer in a task and cancel it at the end; it must not have ended before."""
    task = asyncio.create_task(renewer.run())
    try:
        yield task
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def is_healthy(backend: Backend, server: str) -> bool:
    """Return whether the slot pool considers the server healthy."""
    infos = (await slots_of(backend).inspect()).endpoints
    return next(info.healthy for info in infos if info.endpoint.server == server)
