"""A keeper for tests, on a backend whose time stands still."""

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
    """A keeper on a memory backend whose time stands still, and which may fail."""

    def __init__(self) -> None:
        """Start with nothing registered."""
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
        """Register a server with as many slots, have it be well, and take them all."""
        await self.registry.register(model, "a", URL, number, reports=reports)
        await well(self.backend, model, "a")
        leases = await self.backend.slots.acquire(model, "me", ttl=LEASE, limit=number)
        assert len(leases) == number
        return [self.renewer.hold(lease) for lease in leases]

    async def assign(self, held: RenewedLease, job: str) -> None:
        """Bind a lease in hand to a job."""
        (lease,) = await self.backend.slots.assign((held.lease, job), ttl=LEASE)
        assert lease is not None
        self.renewer.change(held, lease)

    async def check(self) -> None:
        """Check what is due."""
        for info, config, watch in self.renewer.checks.due():
            await self.renewer.checks.check(info, config, watch)

    async def healthy(self, server: str = "a") -> bool:
        """Whether a server is."""
        infos = (await self.backend.slots.inspect()).endpoints
        return next(info.healthy for info in infos if info.endpoint.server == server)


@asynccontextmanager
async def running(renewer: LeaseRenewer) -> AsyncIterator[asyncio.Task[None]]:
    """Run a keeper, and end it; it must not have ended by itself."""
    task = asyncio.create_task(renewer.run())
    try:
        yield task
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def is_healthy(backend: Backend, server: str) -> bool:
    """Whether a server is, by the pool's word."""
    infos = (await slots_of(backend).inspect()).endpoints
    return next(info.healthy for info in infos if info.endpoint.server == server)
