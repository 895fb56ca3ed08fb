"""Tests that a dispatcher learns from refusals how many jobs a server takes at once."""

from __future__ import annotations

import asyncio
from functools import partial

from msgspec import structs

from taskqueue_core.backend import Backend
from taskqueue_dispatch.gpu_server.jobs import GpuJob
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.slot_limits import SlotLimits
from tests.dispatch.gpu_support import lease_of
from tests.dispatch.patience import until
from tests.dispatch.support import dispatching, ended, send, settings

NAME = ("flux", "a")


def begun(gpu: SimulatedGpu, number: int) -> bool:
    """Return whether a server has begun a number of jobs."""
    return sum(gpu.runs.values()) == number


async def test_a_server_that_takes_fewer_jobs(backend: Backend) -> None:
    """A server that takes 2 jobs where 6 were declared always has 2, and refuses only the first ones (U26).

    No pause of the server ends during the test.
    """
    tickets = asyncio.Queue[None]()

    async def handle(_: GpuJob) -> None:
        await tickets.get()

    async with (
        SimulatedGpu(name="a", slots=2, handler=handle) as gpu,
        dispatching(backend, busy_rest=600.0) as dispatcher,
    ):
        await dispatcher.registry.register("flux", "a", gpu.url, 6)
        ids = await send(dispatcher, "flux", 20)
        await until(lambda: gpu.active == 2)
        for number in range(1, 19):
            tickets.put_nowait(None)
            await until(partial(begun, gpu, number + 2))
        tickets.put_nowait(None)
        tickets.put_nowait(None)
        await ended(dispatcher, ids)
        assert gpu.refused <= 4
        assert gpu.most_at_once == 2


async def test_another_server_gets_the_jobs(backend: Backend) -> None:
    """The slots that a server refuses do not keep jobs from another server (U26)."""
    gate = asyncio.Event()

    async def handle(_: GpuJob) -> None:
        await gate.wait()

    async with (
        SimulatedGpu(name="a", slots=1, handler=handle) as one,
        SimulatedGpu(name="b", slots=2, handler=handle) as two,
        dispatching(backend, busy_rest=600.0) as dispatcher,
    ):
        await dispatcher.registry.register("flux", "a", one.url, 6, priority=9)
        await dispatcher.registry.register("flux", "b", two.url, 2)
        ids = await send(dispatcher, "flux", 3)
        await until(lambda: (one.active, two.active) == (1, 2))
        gate.set()
        await ended(dispatcher, ids)
        assert one.refused <= 5


class TestLimits:
    """The rule by which a limit falls and grows (U26)."""

    def setup_method(self) -> None:
        """Create limits with a clock that the test sets, and six jobs on one endpoint."""
        self.now = 0.0
        self.limits = SlotLimits(settings(busy_rest=1.0), lambda: self.now)
        for _ in range(6):
            self.limits.started(*NAME)

    def allowed(self, number: int = 6) -> int:
        """Return how many of some new slots may be used."""
        lease = structs.replace(lease_of("http://a"), model=NAME[0], server=NAME[1])
        usable, surplus = self.limits.divide((), [RenewedLease(lease) for _ in range(number)])
        assert len(usable) + len(surplus) == number
        return len(usable)

    def refuse(self, retry_after: float | None = None) -> bool:
        """Refuse one of the running jobs."""
        alone = self.limits.refused(*NAME, retry_after)
        self.limits.ended(*NAME)
        return alone

    def test_one_pause_per_round(self) -> None:
        """Several refusals at once reduce the limit to what runs, and cause one pause."""
        assert [self.refuse() for _ in range(4)] == [False] * 4
        assert self.allowed() == 0
        self.now = 1.0
        assert self.allowed() == 1
        self.now = 2.0
        assert self.allowed() == 2

    def test_pauses_grow_to_a_bound(self) -> None:
        """A trial that is refused doubles the pause, up to ten times the first one; a good one resets it."""
        pauses = []
        for _ in range(6):
            self.refuse()
            begun = self.now
            while not self.allowed(1):
                self.now += 0.5
            pauses.append(self.now - begun)
            self.limits.started(*NAME)
        assert pauses == [1, 2, 4, 8, 10, 10]
        self.now += 10
        assert self.allowed(1) == 1
        self.limits.started(*NAME)
        self.refuse()
        self.now += 2
        assert self.allowed(1) == 1

    def test_retry_after(self) -> None:
        """A longer Retry-After is respected."""
        self.refuse(7.0)
        self.now = 6.9
        assert self.allowed() == 0
        self.now = 7.0
        assert self.allowed() == 1

    def test_the_only_job(self) -> None:
        """The refusal of an endpoint's only job says so; an endpoint without jobs and limit is forgotten."""
        assert [self.refuse() for _ in range(6)] == [False] * 5 + [True]
        other = SlotLimits(settings(busy_rest=1.0))
        other.started(*NAME)
        other.ended(*NAME)
        assert not other._limits
