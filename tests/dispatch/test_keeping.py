"""Tests of the lease renewer, which renews the slots that a dispatcher holds and detects lost ones."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Left, Permit, Seen, SlotLease, slots_of
from taskqueue_dispatch.lease_renewal import LeaseRenewer
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import URL, Failing, Servers, registry_of, settings, well
from tests.dispatch.keepers import HOUR, LEASE, Desk, is_healthy, running
from tests.dispatch.patience import PATIENCE, until


@pytest.fixture
def desk() -> Desk:
    """Return a lease renewer with a manual clock."""
    return Desk()


async def test_a_lease_stays_good_while_its_job_runs(backend: Backend) -> None:
    """A held lease is renewed for as long as its job runs (C20, C21, FIX-C7)."""
    registry = await registry_of(backend)
    await registry.register("flux", "a", URL, 2)
    await well(backend, "flux", "a")
    pool, servers = slots_of(backend), Servers()
    servers.say["a"] = Seen(active=1)
    leases = await pool.acquire("flux", "me", ttl=0.6, limit=2)
    renewer = LeaseRenewer(pool, registry, servers, settings(lease=0.6, health_interval=60))
    held, dropped = map(renewer.hold, leases)
    renewer.drop(dropped)
    renewer.drop(dropped)
    until_when = held.lease.expires_at
    async with running(renewer):
        await until(lambda: held.lease.expires_at > until_when + 0.6, "the lease was renewed")
    (told,) = (await pool.inspect("flux")).leases
    assert told.fence == held.lease.fence
    assert not held.lost.is_set()
    (lease,) = await pool.assign((held.lease, "job"), ttl=60)
    assert lease is not None


async def test_all_leases_in_one_batch(desk: Desk) -> None:
    """All held leases are renewed together, up to a thousand per call (C21)."""
    await desk.take(700)
    await desk.take(400, model="sdxl")
    assert await desk.renewer.renew()
    assert desk.pool.calls["renew"] == 2


async def test_a_stale_lease_is_lost(desk: Desk) -> None:
    """A lease that was released or taken over is marked as lost at the next renewal (C20, OPEN-C4)."""
    first, second = await desk.take(2)
    await desk.backend.slots.release(first.lease)
    await desk.renewer.renew()
    assert (first.lost.is_set(), second.lost.is_set()) == (True, False)
    await desk.assign(second, "job")
    (other,) = await desk.backend.slots.acquire("flux", "another", ttl=LEASE)
    (other_lease,) = await desk.backend.slots.assign((other, "job"), ttl=LEASE)
    assert other_lease is not None
    assert other_lease.resumed
    await desk.renewer.renew()
    assert second.lost.is_set()


async def test_notes_come_with_renewals(desk: Desk) -> None:
    """A note that a GPU server leaves at a job's slot is delivered once, and so is a newer note (C7)."""
    (held,) = await desk.take()
    await desk.assign(held, "job")
    await desk.renewer.renew()
    assert not held.noted.is_set()
    pool = desk.backend.slots
    assert await pool.leave("flux", "job", held.lease.token, b'{"n":1}') is Left.TAKEN
    await desk.renewer.renew()
    assert (held.noted.is_set(), held.note) == (True, b'{"n":1}')
    held.noted.clear()
    await desk.renewer.renew()
    assert not held.noted.is_set()
    await pool.leave("flux", "job", held.lease.token, b'{"n":2}')
    (lease,) = await pool.detach(held.lease, ttl=HOUR)
    assert lease is not None
    desk.renewer.change(held, lease)
    assert (held.noted.is_set(), held.note) == (True, b'{"n":2}')
    assert held.lease.state is Permit.DETACHED


async def test_a_signal_makes_notes_be_read_at_once(desk: Desk) -> None:
    """After a signal, notes are read at once, in one call and only for leases with jobs of that model (C7, C19)."""
    held, spare = await desk.take(2)
    await desk.assign(held, "job")
    async with running(desk.renewer):
        await until(lambda: desk.pool.calls["renew"] == 1)
        before = spare.lease
        await desk.backend.slots.leave("flux", "job", held.lease.token, b'{"n":1}')
        for _ in range(1000):
            desk.renewer.check_notes("flux")
            desk.renewer.check_notes("of somebody else")
        async with asyncio.timeout(PATIENCE):
            await held.noted.wait()
        assert held.note == b'{"n":1}'
        assert desk.pool.calls["renew"] == 2
        assert spare.lease is before


async def test_an_outage_of_the_store(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """While the store is unavailable no lease is marked as lost; afterwards the store decides (C23, C26)."""
    spare, running_one, detached = await desk.take(3)
    await desk.assign(running_one, "job")
    await desk.assign(detached, "long")
    (lease,) = await desk.backend.slots.detach(detached.lease, ttl=HOUR)
    assert lease is not None
    desk.renewer.change(detached, lease)
    desk.pool.down = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            await desk.clock.advance(LEASE)
            assert not await desk.renewer.renew()
    assert not any(held.lost.is_set() for held in (spare, running_one, detached))
    assert len([line for line in caplog.records if "renew slots" in line.message]) == 1
    desk.pool.down = False
    assert await desk.renewer.renew()
    assert spare.lost.is_set()
    assert not running_one.lost.is_set()
    assert not detached.lost.is_set()
    assert running_one.lease.expires_at == desk.clock.now() + LEASE
    assert detached.lease.expires_at > desk.clock.now() + LEASE


async def test_the_loop_outlives_everything(backend: Backend) -> None:
    """Neither a failing store nor an exception from a health check ends the renewer's loops (C23)."""
    registry, servers = await registry_of(backend), Servers()
    await registry.register("flux", "a", URL, 1, reports=False)
    await registry.register("flux", "b", URL, 1)
    pool = Failing(slots_of(backend))
    (lease,) = await pool.acquire("flux", "me", ttl=1)
    renewer = LeaseRenewer(
        cast("Any", pool), registry, servers, settings(lease=1, health_interval=0.02, settled=0.01)
    )
    held = renewer.hold(lease)
    servers.say["b"] = ValueError("no such thing")
    pool.down = True
    async with running(renewer):
        await until(lambda: pool.calls["renew"] > 3 and servers.asked["b"] > 3)
        servers.say["b"] = Seen(active=0)
        await until(lambda: pool.calls["reconcile"] > 3)
        pool.down = False
        since = held.lease.expires_at
        await until(lambda: held.lease.expires_at > since, "the lease is renewed again")
        await until(lambda: is_healthy(backend, "b"), "the endpoint is healthy")
    assert not held.lost.is_set()


async def test_a_store_that_hangs() -> None:
    """A renewal that hangs is given up and repeated (C21, C23)."""
    desk = Desk()
    (held,) = await desk.take()
    renewer = LeaseRenewer(
        cast("Any", desk.pool), desk.registry, desk.servers, settings(lease=0.3, health_interval=60)
    )
    held = renewer.hold(held.lease)
    desk.pool.held = {"renew"}
    async with running(renewer):
        await until(lambda: desk.pool.calls["renew"] > 2)
        before = held.lease
        desk.pool.held.clear()
        await until(lambda: held.lease is not before)
    assert not held.lost.is_set()


async def test_a_change_that_crosses_a_renewal(desk: Desk) -> None:
    """The response to a renewal that was sent before a lease changed does not undo the change (C21, OPEN-C4)."""
    (held,) = await desk.take()
    desk.pool.held = {"renew"}
    renewal = asyncio.create_task(desk.renewer.renew())
    await until(lambda: desk.pool.calls["renew"] == 1)
    await desk.assign(held, "job")
    await desk.clock.advance(1)
    desk.pool.held.clear()
    assert await renewal
    assert (held.lease.state, held.lease.job) == (Permit.ASSIGNED, "job")
    assert not held.lost.is_set()


async def test_a_takeover_that_crosses_a_renewal(desk: Desk) -> None:
    """If a job's slot is taken over during a renewal, the lease that took over is not lost (OPEN-C4)."""
    first, second = await desk.take(2)
    await desk.assign(first, "job")
    # The response to `assign` arrives after the renewal has found that the token given to `assign` is stale.
    (lease,) = await desk.backend.slots.assign((second.lease, "job"), ttl=LEASE)
    assert lease is not None
    assert lease.resumed

    def arrives(*leases: SlotLease, ttl: float) -> Any:
        desk.pool.put("renew", desk.backend.slots.renew)
        answer = desk.backend.slots.renew(*leases, ttl=ttl)
        asyncio.get_running_loop().call_soon(desk.renewer.change, second, lease)
        return answer

    desk.pool.put("renew", arrives)
    await desk.renewer.renew()
    assert first.lost.is_set()
    await desk.renewer.renew()
    assert not second.lost.is_set()
    assert second.lease.job == "job"


async def test_leases_of_a_pool_that_was_emptied(desk: Desk) -> None:
    """After the slot pool was emptied, a running job's lease is restored with a new token (fault H9)."""
    spare, held = await desk.take(2)
    await desk.assign(held, "job")
    await desk.registry.refresh()
    other = MemoryBackend(clock=desk.clock)
    desk.registry._pool = desk.renewer.checks._pool = cast("Any", other.slots)
    desk.renewer._pool = cast("Any", other.slots)
    await desk.registry.refresh()
    before = held.lease
    assert await desk.renewer.renew()
    assert held.lease.token != before.token
    assert not held.lost.is_set()
    assert spare.lost.is_set()
    (told,) = (await other.slots.inspect("flux")).leases
    assert (told.job, told.fence) == ("job", held.lease.fence)
    assert await desk.renewer.renew()
    assert not held.lost.is_set()
