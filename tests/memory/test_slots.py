"""The slot pool of the memory backend: bounded steps, and no state left of ended leases."""

from __future__ import annotations

import asyncio

from taskqueue_core.capabilities import Endpoint, Permit, Seen, SlotLease
from taskqueue_core.clock import ManualClock
from taskqueue_memory import MemoryBackend
from taskqueue_memory.due_heap import ROOM
from taskqueue_memory.slots.pool import MemorySlots

MODEL = "model-1"


async def served(slots: MemorySlots, count: int, server: str = "s1") -> None:
    """Register an idle endpoint with this number of slots."""
    await slots.register(Endpoint(model=MODEL, server=server, url="http://x", slots=count))
    await slots.reconcile(MODEL, server, Seen(active=0), settled=1)


async def test_a_sweep_is_bounded(backend: MemoryBackend, clock: ManualClock) -> None:
    """One call removes at most 1,000 expired leases; an expired lease is refused even before its removal (C20)."""
    await served(backend.slots, 2500)
    leases: list[SlotLease] = []
    for _ in range(5):
        leases += await backend.slots.acquire(MODEL, "h1", ttl=10, limit=500)
    await clock.advance(10)
    (told,) = (await backend.slots.inspect()).endpoints
    assert told.held == 1500
    last = leases[-1]
    assert await backend.slots.renew(last, ttl=10) == (None,)
    assert await backend.slots.detach(last, ttl=10) == (None,)
    assert await backend.slots.assign((last, "job-1"), ttl=10) == (None,)
    assert await backend.slots.release(last) == (False,)
    (told,) = (await backend.slots.inspect()).endpoints
    assert told.held == 0


async def test_nothing_is_kept_of_what_is_over(backend: MemoryBackend, clock: ManualClock) -> None:
    """After 1,000 rounds of leases, notes and endpoints, no state of them remains in the pool (OPEN-B2)."""
    slots, pool = backend.slots, backend.slots._pool
    for number in range(1000):
        server = f"s{number}"
        await served(slots, 2, server)
        one, two = await slots.acquire(MODEL, "h1", ttl=10, limit=2)
        (bound, _) = await slots.assign((one, f"job-{number}"), (two, f"other-{number}"), ttl=10)
        assert bound is not None
        await slots.leave(MODEL, f"job-{number}", bound.token, b"1")
        await slots.leave(MODEL, f"job-{number}", "stale", b"1")
        await slots.remove(MODEL, server)
        await slots.release(one, two)
    kept = (pool.leases, pool.jobs, pool.models, pool.servers, pool.signals.open)
    assert not any(kept)
    assert len(pool._ends) <= ROOM
    await clock.advance(3600)
    assert await slots.late(MODEL, "job-999") == ()
    assert not pool.late.notes


async def test_renewals_leave_nothing_behind(backend: MemoryBackend, clock: ManualClock) -> None:
    """A lease that is renewed many times keeps a bounded number of expiry entries (C21)."""
    await served(backend.slots, 1)
    (lease,) = await backend.slots.acquire(MODEL, "h1", ttl=86_400)
    for _ in range(2000):
        await clock.advance(10)
        (kept,) = await backend.slots.renew(lease, ttl=86_400)
        assert kept is not None
    assert len(backend.slots._pool._ends) <= 2 + ROOM


async def test_where_reports_come_and_go(backend: MemoryBackend, clock: ManualClock) -> None:
    """Registering an endpoint again with ``reports=False`` frees its overdue slots.

    An operator can use this (C12, C18).
    """
    await served(backend.slots, 2)
    leases = await backend.slots.acquire(MODEL, "h1", ttl=10, limit=2)
    await backend.slots.assign((leases[0], "job-1"), (leases[1], "job-2"), ttl=10)
    await clock.advance(10)
    assert (await backend.slots.inspect()).endpoints[0].overdue == 2
    await backend.slots.renew(leases[1], ttl=10)
    endpoint = Endpoint(model=MODEL, server="s1", url="http://x", slots=2, reports=False)
    assert (await backend.slots.register(endpoint)).held == 1
    await clock.advance(10)
    assert (await backend.slots.inspect()).leases == ()


async def test_a_closed_slot_signal_is_forgotten(backend: MemoryBackend) -> None:
    """A closed slot signal is forgotten, also if its wait was cancelled (B3, B7)."""
    async with backend.slots.slot_signal(MODEL, "other") as signal:
        waiting = asyncio.ensure_future(signal.wait(60))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert not backend.slots._pool.signals.open


async def test_two_backends_are_two_pools() -> None:
    """Two backends have pools with different epochs.

    A lease token of one pool cannot release a slot of the other (C23).
    """
    one, two = MemoryBackend(), MemoryBackend()
    for backend in (one, two):
        await served(backend.slots, 1)
    (lease,) = await one.slots.acquire(MODEL, "h1", ttl=10)
    (bound,) = await one.slots.assign((lease, "job-1"), ttl=10)
    assert bound is not None
    assert (await one.slots.inspect()).epoch != (await two.slots.inspect()).epoch
    assert await two.slots.release(bound) == (False,)
    (anew,) = await two.slots.renew(bound, ttl=10)
    assert anew is not None
    assert (anew.state, anew.fence) == (Permit.ASSIGNED, 1)
