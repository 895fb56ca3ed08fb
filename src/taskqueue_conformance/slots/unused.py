"""The capability ``slots``: unassigned leases end at once when their endpoint may no longer be given jobs."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.slots.helpers import LONG, MODEL, OTHER_MODEL
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Permit, SlotLease

T = TypeVar("T")


class SlotUnusedSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests of calls that stop an endpoint from getting jobs: they must end the endpoint's unassigned leases."""

    async def test_drained_with_an_idle_slot(self, bench: Bench) -> None:
        """An unassigned lease ends when its endpoint is drained, but not when draining ends (C12; fault H7)."""
        held = await _busy_and_idle(bench)
        await _check_held(bench, bench.slots.drain(MODEL, "s1", draining=False), held)
        await _clears(bench, bench.slots.drain(MODEL, "s1"), held)
        await bench.slots.drain(MODEL, "s1", draining=False)
        assert {lease.server for lease in await bench.pool.take(4, "h2")} == {"s1", "s2"}

    async def test_removed_with_an_idle_slot(self, bench: Bench) -> None:
        """An unassigned lease ends when its endpoint is removed, and does not delay the deletion (fault H7)."""
        held = await _busy_and_idle(bench)
        await _clears(bench, bench.slots.remove(MODEL, "s1"), held)
        await bench.pool.expect(removed=True)
        assert await bench.slots.release(held[0]) == (True,)
        assert await bench.pool.servers(MODEL) == ["s2"]
        idle = await bench.pool.take(1, "h2")
        assert await bench.slots.remove(MODEL, "s2")
        assert await bench.pool.servers(MODEL) == []
        await bench.pool.check_stale(*idle)
        assert not await bench.slots.remove(MODEL, "s2")

    async def test_rested_with_an_idle_slot(self, bench: Bench) -> None:
        """An unassigned lease ends when its endpoint is paused, but not when the pause ends (C2; fault H8)."""
        held = await _busy_and_idle(bench)
        await _check_held(bench, bench.slots.rest(MODEL, "s1", 0), held)
        await _clears(bench, bench.slots.rest(MODEL, "s1", bench.short), held)
        await bench.advance(bench.short)
        assert {lease.server for lease in await bench.pool.take(4, "h2")} == {"s1", "s2"}

    async def test_silent_with_an_idle_slot(self, bench: Bench) -> None:
        """If a server does not answer, its unassigned leases end; ``reconcile`` returns no lease (C23; fault H4)."""
        held = await _busy_and_idle(bench)
        await _check_held(bench, bench.pool.report(1, "job-1"), held)
        assert await _clears(bench, bench.pool.report(None), held) == []
        assert await bench.pool.report(1, "job-1") == []
        assert {lease.server for lease in await bench.pool.take(4, "h2")} == {"s1", "s2"}

    async def test_silent_without_reports(self, bench: Bench) -> None:
        """An endpoint with ``reports=False`` keeps its unassigned leases if its server does not answer (C12)."""
        await bench.pool.add(reports=False)
        (idle,) = await bench.pool.take()
        assert await bench.pool.report(None) == []
        await bench.pool.assign(idle, "job-1")

    async def test_several_idle_slots(self, bench: Bench) -> None:
        """All unassigned leases of an endpoint end together, however many there are (C12; fault H7)."""
        await bench.pool.serving("job-1", slots=1300)
        idle = [await bench.pool.take(600, holder) for holder in ("h1", "h2")]
        await bench.slots.drain(MODEL, "s1")
        assert await bench.pool.jobs() == ["job-1"]
        for leases in idle:
            assert await bench.slots.renew(*leases, ttl=LONG) == (None,) * 600


async def _busy_and_idle(bench: Bench) -> tuple[SlotLease, SlotLease]:
    """Return an assigned and an unassigned lease on ``s1``, after acquiring leases on other endpoints."""
    busy, idle = (await bench.pool.serving("job-1", slots=3))[0], (await bench.pool.take())[0]
    await bench.pool.serve("s2", slots=3, priority=6)
    await bench.pool.serve(slots=1, model=OTHER_MODEL)
    await bench.pool.take(model=OTHER_MODEL)
    (elsewhere,) = await bench.pool.take()
    assert (busy.server, idle.server, elsewhere.server) == ("s1", "s1", "s2")
    return busy, idle


async def _check_held(
    bench: Bench, call: Awaitable[object], held: tuple[SlotLease, SlotLease]
) -> None:
    """Fail if a call changes the leases of the pool."""
    before = (await bench.pool.inspect()).leases
    await call
    assert (await bench.pool.inspect()).leases == before
    assert None not in await bench.slots.renew(*held, ttl=LONG)


async def _clears(bench: Bench, call: Awaitable[T], held: tuple[SlotLease, SlotLease]) -> T:
    """Fail unless a call ends the unassigned lease in ``held``, and no other lease; return the answer of the call."""
    busy, idle = held
    before = (await bench.pool.inspect()).leases
    answer = await call
    assert answer is not False
    after = (await bench.pool.inspect()).leases
    assert after == tuple(lease for lease in before if lease.fence != idle.fence)
    await bench.pool.expect(unassigned=0, assigned=1)
    await bench.pool.check_stale(idle)
    assert (await bench.pool.renew(busy)).state is Permit.ASSIGNED
    await bench.pool.none_free(limit=0)
    return answer
