"""The capability ``slots``: each slot has at most one holder, identified by its token."""

from __future__ import annotations

import msgspec

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.slots.helpers import (
    LONG,
    MODEL,
    OTHER_MODEL,
    add,
    check_stale,
    glance,
    inspect_pool,
    report_observation,
    running,
    serve,
    take,
    take_over,
)
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Left, Permit, SlotLease


class SlotLeasesSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests of `SlotPool.acquire`, ``assign``, ``detach``, ``renew`` and ``release``."""

    async def test_as_many_as_there_are(self, bench: Bench) -> None:
        """Each slot is granted once; if none is free, ``acquire`` returns nothing (B6, B9, C20; FIX-C4)."""
        await serve(bench, slots=3)
        first = await take(bench, 2)
        second = await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=5)
        assert len(second) == 1
        assert await bench.slots.acquire(MODEL, "h1", ttl=LONG, limit=5) == ()
        leases = [*first, *second]
        assert len({lease.token for lease in leases}) == 3, "two leases have the same token"
        assert [lease.fence for lease in leases] == sorted({lease.fence for lease in leases})
        for lease, holder in zip(leases, ["h1", "h1", "h2"], strict=True):
            assert (lease.model, lease.server) == (MODEL, "s1")
            assert lease.url == "http://s1.example/run"
            assert (lease.holder, lease.state, lease.job) == (holder, Permit.UNASSIGNED, None)
        endpoint = await glance(bench)
        assert (endpoint.held, endpoint.free, endpoint.unassigned) == (3, 0, 3)

    async def test_unknown_models_have_none(self, bench: Bench) -> None:
        """Acquiring a slot of an unregistered model returns nothing, and is no error (B9)."""
        await serve(bench)
        assert await bench.slots.acquire(OTHER_MODEL, "h1", ttl=LONG) == ()
        assert (await inspect_pool(bench, OTHER_MODEL)).endpoints == ()

    async def test_states_of_a_lease(self, bench: Bench) -> None:
        """A lease is unassigned, then assigned to a job, then detached, and keeps its token (B8)."""
        await serve(bench, slots=2)
        (lease,) = await take(bench)
        (bound,) = await bench.slots.assign((lease, "job-1"), ttl=LONG)
        assert bound is not None
        assert (bound.state, bound.job, bound.resumed) == (Permit.ASSIGNED, "job-1", False)
        (free,) = await bench.slots.detach(bound, ttl=LONG)
        assert free is not None
        assert (free.state, free.job, free.token) == (Permit.DETACHED, "job-1", lease.token)
        endpoint = await glance(bench)
        assert (endpoint.unassigned, endpoint.assigned, endpoint.detached, endpoint.free) == (
            0,
            0,
            1,
            1,
        )
        (there,) = (await inspect_pool(bench)).leases
        assert there == msgspec.structs.replace(free, token="")

    async def test_only_jobs_run_on_by_themselves(self, bench: Bench) -> None:
        """A lease without a job cannot be detached (B8)."""
        await serve(bench)
        (lease,) = await take(bench)
        assert await bench.slots.detach(lease, ttl=LONG) == (None,)
        assert (await glance(bench)).unassigned == 1

    async def test_release_gives_back(self, bench: Bench) -> None:
        """A release frees the slot in each state; a second one is refused (B7; OPEN-C4, FIX-C8)."""
        await serve(bench, slots=3)
        unassigned, assigned, detached = await take(bench, 3)
        await bench.slots.assign((assigned, "job-1"), (detached, "job-2"), ttl=LONG)
        await bench.slots.detach(detached, ttl=LONG)
        assert await bench.slots.release(unassigned, assigned, detached) == (True, True, True)
        assert await bench.slots.release(unassigned, assigned, detached) == (False,) * 3
        assert (await glance(bench)).free == 3
        await take(bench, 3)

    async def test_a_released_token_is_stale(self, bench: Bench) -> None:
        """The token of a released lease changes nothing for the next holder (OPEN-C4; C23)."""
        await serve(bench)
        (before,) = await running(bench, "job-1")
        await bench.slots.release(before)
        (now,) = await running(bench, "job-2", holder="h2")
        assert now.fence > before.fence
        await check_stale(bench, before)
        assert (await bench.slots.renew(now, ttl=LONG))[0] is not None

    async def test_made_up_tokens(self, bench: Bench) -> None:
        """A token that was never issued, or that was altered, is stale (OPEN-C4)."""
        await serve(bench)
        (lease,) = await take(bench)
        epoch, fence, random = lease.token.split(".")
        strange = ["", ".", "x", "1.2.3", "é.1.x", "a.-1.b", "..", "0" * 300, lease.token + "0"]
        halves = [f"{epoch}.{fence}.", f"{epoch}.{fence}.{random[:-1]}", f"{epoch}..{random}"]
        for token in strange + halves:
            await check_stale(bench, msgspec.structs.replace(lease, token=token))

    async def test_tokens_are_not_in_the_repr(self, bench: Bench) -> None:
        """The repr of a lease, which may appear in logs, contains neither its token nor its note."""
        await serve(bench)
        (lease,) = await running(bench, "job-1")
        await bench.slots.leave(MODEL, "job-1", lease.token, b'"a note"')
        (noted,) = await bench.slots.renew(lease, ttl=LONG)
        assert lease.token not in repr(noted)
        assert "a note" not in repr(noted)

    async def test_unassigned_runs_out(self, bench: Bench) -> None:
        """An unassigned lease ends after its ttl, and its token is stale (C20, C23; fault H2)."""
        await serve(bench)
        (lease,) = await take(bench, ttl=bench.short)
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG) == ()
        await bench.advance(bench.short)
        await check_stale(bench, lease)
        assert (await glance(bench)).free == 1
        await take(bench, holder="h2")

    async def test_renewed_in_time(self, bench: Bench) -> None:
        """A lease is kept as long as its holder renews it in time (C21; FIX-C7)."""
        await serve(bench)
        (lease,) = await take(bench, ttl=2 * bench.short)
        for _ in range(4):
            await bench.advance(bench.short)
            (retained,) = await bench.slots.renew(lease, ttl=2 * bench.short)
            assert retained is not None
            assert (retained.token, retained.fence) == (lease.token, lease.fence)
            assert retained.expires_at > lease.expires_at
            lease = retained
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG) == ()

    async def test_renewal_shortens_nothing(self, bench: Bench) -> None:
        """A renewal never shortens a lease, in any state of the lease (B8; C21)."""
        await serve(bench, slots=3)
        (unassigned,) = await take(bench)
        assigned, detached = await running(bench, "job-1", "job-2")
        await bench.slots.detach(detached, ttl=LONG)
        leases = await bench.slots.renew(unassigned, assigned, detached, ttl=bench.short)
        assert all(lease and lease.expires_at > bench.now + LONG / 2 for lease in leases)
        states = [lease and lease.state for lease in leases]
        assert states == [Permit.UNASSIGNED, Permit.ASSIGNED, Permit.DETACHED]

    async def test_jobs_outlive_their_time(self, bench: Bench) -> None:
        """An expired lease with a job keeps its slot if the server reports its jobs (OPEN-C3, C23; fault H3)."""
        await serve(bench, slots=2)
        assigned, detached = await running(bench, "job-1", "job-2", ttl=bench.short)
        await bench.slots.detach(detached, ttl=bench.short)
        await bench.advance(3 * bench.short)
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=2) == ()
        endpoint = await glance(bench)
        assert (endpoint.assigned, endpoint.detached, endpoint.overdue, endpoint.free) == (
            1,
            1,
            2,
            0,
        )
        leases = await bench.slots.renew(assigned, ttl=LONG)
        assert leases[0] is not None, "an expired lease must still be valid for its holder"
        assert (await glance(bench)).overdue == 1
        assert await bench.slots.release(detached) == (True,)

    async def test_time_frees_where_no_server_reports(self, bench: Bench) -> None:
        """With ``reports=False``, a lease with a job ends when it expires (C18, C20; OPEN-C3)."""
        await serve(bench, slots=2, reports=False)
        assigned, detached = await running(bench, "job-1", "job-2", ttl=bench.short)
        await bench.slots.detach(detached, ttl=2 * bench.short)
        await bench.advance(bench.short)
        await check_stale(bench, assigned)
        assert (await glance(bench)).free == 1
        await bench.advance(bench.short)
        assert len(await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=3)) == 2

    async def test_assigning_again(self, bench: Bench) -> None:
        """Assigning the same job again, after a lost answer, returns the same lease (B8)."""
        await serve(bench, slots=2)
        (lease,) = await take(bench)
        (first,) = await bench.slots.assign((lease, "job-1"), ttl=LONG)
        (again,) = await bench.slots.assign((lease, "job-1"), ttl=LONG)
        assert first is not None
        assert again is not None
        assert (again.token, again.state, again.resumed) == (first.token, Permit.ASSIGNED, False)
        await bench.slots.detach(lease, ttl=LONG)
        (back,) = await bench.slots.assign((lease, "job-1"), ttl=LONG)
        assert back is not None
        assert back.state is Permit.ASSIGNED
        assert (await glance(bench)).held == 1

    async def test_one_job_for_each_lease(self, bench: Bench) -> None:
        """A lease with a job takes no other job: its own may already be sent to the server (B8; fault H1)."""
        await serve(bench, slots=2)
        (lease,) = await running(bench, "job-1")
        assert await bench.slots.assign((lease, "job-2"), ttl=LONG) == (None,)
        (there,) = (await inspect_pool(bench)).leases
        assert there.job == "job-1"

    async def test_a_job_takes_its_slot_over(self, bench: Bench) -> None:
        """A job that has a lease gets that one, with a new holder; the newly acquired slot is freed (B8, C23)."""
        await serve(bench, slots=2)
        (before,) = await running(bench, "job-1")
        await bench.slots.detach(before, ttl=LONG)
        fresh, over = await take_over(bench)
        assert (over.resumed, over.holder, over.state) == (True, "h2", Permit.ASSIGNED)
        assert over.fence > max(before.fence, fresh.fence)
        assert over.token not in (before.token, fresh.token)
        await check_stale(bench, before)
        assert await bench.slots.release(fresh) == (False,)
        endpoint = await glance(bench)
        assert (endpoint.assigned, endpoint.free) == (1, 1)
        assert await bench.slots.release(over) == (True,)

    async def test_taking_over_again(self, bench: Bench) -> None:
        """Repeating a takeover after a lost answer returns the same lease (fault H2)."""
        await serve(bench, slots=2)
        await running(bench, "job-1")
        (fresh,) = await take(bench, holder="h2")
        (over,) = await bench.slots.assign((fresh, "job-1"), ttl=LONG)
        (again,) = await bench.slots.assign((fresh, "job-1"), ttl=LONG)
        assert over is not None
        assert again is not None
        assert (again.token, again.resumed) == (over.token, True)
        assert await bench.slots.assign((fresh, "job-2"), ttl=LONG) == (None,)

    async def test_takeover_across_servers(self, bench: Bench) -> None:
        """A job that is taken over keeps its server, even if the new slot is elsewhere (C23; fault H1)."""
        await serve(bench, "s1")
        (before,) = await running(bench, "job-1")
        await serve(bench, "s2")
        (fresh,) = await take(bench, holder="h2")
        assert (before.server, fresh.server) == ("s1", "s2")
        (over,) = await bench.slots.assign((fresh, "job-1"), ttl=LONG)
        assert over is not None
        assert (over.server, over.url) == ("s1", before.url)
        assert (await glance(bench, "s2")).free == 1

    async def test_the_same_job_of_two_models(self, bench: Bench) -> None:
        """Jobs of two models may have the same name; each has a slot of its own (fault H7)."""
        await serve(bench)
        await serve(bench, model=OTHER_MODEL)
        (lease,) = await running(bench, "job-1")
        (two,) = await running(bench, "job-1", model=OTHER_MODEL)
        assert not two.resumed
        assert (await bench.slots.renew(lease, two, ttl=LONG)).count(None) == 0

    async def test_a_batch_of_jobs(self, bench: Bench) -> None:
        """A batch of leases is answered in order; a stale lease does not affect the others (B8)."""
        await serve(bench, slots=3)
        item, stale, two = await take(bench, 3)
        await bench.slots.release(stale)
        pairs = ((item, "job-1"), (stale, "job-2"), (two, "job-3"))
        bound = await bench.slots.assign(*pairs, ttl=LONG)
        assert [lease and lease.job for lease in bound] == ["job-1", None, "job-3"]
        leases = await bench.slots.renew(two, stale, item, ttl=LONG)
        assert [lease and lease.job for lease in leases] == ["job-3", None, "job-1"]
        out = await bench.slots.detach(stale, item, ttl=LONG)
        assert [lease and lease.state for lease in out] == [None, Permit.DETACHED]
        assert await bench.slots.release(stale, two) == (False, True)
        assert await bench.slots.release() == ()

    async def test_exchanged_in_one_step(self, bench: Bench) -> None:
        """One ``acquire`` releases leases and acquires others; stale leases are ignored (C19, C20)."""
        await serve(bench, slots=2)
        lease, two = await running(bench, "job-1", "job-2")
        (next_one,) = await bench.slots.acquire(MODEL, "h1", ttl=LONG, releasing=[lease], limit=2)
        assert next_one.state is Permit.UNASSIGNED
        assert await bench.slots.acquire(MODEL, "h1", ttl=LONG, releasing=[lease]) == ()
        assert await bench.slots.acquire(MODEL, "h1", ttl=LONG, releasing=[two], limit=0) == ()
        endpoint = await glance(bench)
        assert (endpoint.unassigned, endpoint.assigned, endpoint.free) == (1, 0, 1)

    async def test_idle_slots_are_taken(self, bench: Bench) -> None:
        """With ``idle``, unassigned slots of other holders are taken, oldest first, no more than needed (B9)."""
        await serve(bench, slots=4)
        (lease,) = await take(bench, holder="h2")
        (old,) = await take(bench)
        (busy,) = await running(bench, "job-1")
        await bench.advance(2 * bench.short)
        await bench.slots.renew(old, ttl=2 * LONG)
        (young,) = await take(bench)
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG, idle=100 * bench.short) == ()
        (taken,) = await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=3, idle=bench.short)
        assert (taken.holder, taken.state) == ("h2", Permit.UNASSIGNED)
        assert taken.token != old.token
        await check_stale(bench, old)
        leases = await bench.slots.renew(lease, young, busy, taken, ttl=LONG)
        assert None not in leases, "a lease was taken that is its own, recent or bound to a job"

    async def test_free_slots_before_idle_ones(self, bench: Bench) -> None:
        """With ``idle``, free slots are granted first, then idle slots of other holders (B9)."""
        await serve(bench, slots=4)
        older, _ = idle = await take(bench, 2)
        await bench.advance(2 * bench.short)
        assert len(await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=2, idle=bench.short)) == 2
        assert None not in await bench.slots.renew(*idle, ttl=LONG)
        assert len(await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=1, idle=bench.short)) == 1
        leases = await bench.slots.renew(*idle, ttl=LONG)
        assert [lease is None for lease in leases] == [True, False]
        await check_stale(bench, older)

    async def test_idle_slots_where_nothing_is_given(self, bench: Bench) -> None:
        """No idle slots are taken if the endpoint is unhealthy or has too many leases (B9; fault H7)."""
        await add(bench, slots=2, reports=False)
        idle = await take(bench, 2)
        await bench.advance(2 * bench.short)
        assert not (await add(bench, slots=2)).usable, "no server has reported yet"
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=2, idle=bench.short) == ()
        await serve(bench, slots=1)
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=2, idle=bench.short) == ()
        assert None not in await bench.slots.renew(*idle, ttl=LONG)

    async def test_leases_of_a_lost_pool(self, bench: Bench) -> None:
        """After a loss of the pool, a renewal recreates a job's lease, even without a free slot (C23; fault H9)."""
        await serve(bench)
        (there,) = await running(bench, "job-0")
        for state in (Permit.ASSIGNED, Permit.DETACHED):
            job = f"job-{state}"
            lost = _of_an_earlier_pool(there, state=state, job=job)
            (lease,) = await bench.slots.renew(lost, ttl=LONG)
            assert lease is not None, "a running job has no lease after the loss of the pool"
            assert (lease.job, lease.state, lease.holder) == (job, state, lost.holder)
            assert lease.token != lost.token
            assert lease.fence > there.fence
            assert bench.now < lease.expires_at < bench.now + 2 * LONG
            (again,) = await bench.slots.renew(lost, ttl=LONG)
            assert again is not None
            assert again.token == lease.token, "a repeated renewal must return the same lease"
            assert await bench.slots.leave(MODEL, job, lease.token, b"1") is Left.TAKEN
        assert (await glance(bench)).held == 3
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG) == ()
        assert await report_observation(bench, 0) == []
        await bench.advance(bench.short)
        assert len(await report_observation(bench, 0)) == 3

    async def test_what_a_lost_pool_leaves_lost(self, bench: Bench) -> None:
        """No lease is recreated without a job, for a job with a slot, or on an unknown endpoint (fault H9)."""
        await serve(bench)
        (there,) = await running(bench, "job-0")
        idle = _of_an_earlier_pool(there, state=Permit.UNASSIGNED, job=None)
        had = _of_an_earlier_pool(there)
        elsewhere = _of_an_earlier_pool(there, server="s9", job="job-9")
        late = msgspec.structs.replace(there, job="job-9", token=f"{there.token}0")
        lost = (idle, had, elsewhere, late)
        assert await bench.slots.renew(*lost, ttl=LONG) == (None,) * 4
        for lease in lost:
            await check_stale(bench, lease)

    async def test_only_a_renewal_restores_leases(self, bench: Bench) -> None:
        """After a loss of the pool, only ``renew`` accepts the old tokens (fault H9)."""
        await serve(bench)
        (there,) = await running(bench, "job-0")
        lost = _of_an_earlier_pool(there, job="job-1")
        assert await bench.slots.release(lost) == (False,)
        assert await bench.slots.detach(lost, ttl=LONG) == (None,)
        assert await bench.slots.assign((lost, "job-1"), ttl=LONG) == (None,)
        assert await bench.slots.leave(MODEL, "job-1", lost.token, b"1") is Left.LATE
        assert (await glance(bench)).held == 1


def _of_an_earlier_pool(lease: SlotLease, **fields: object) -> SlotLease:
    """Return a copy of a lease with the token of a pool that no longer exists."""
    return msgspec.structs.replace(lease, **{"token": "0ldp001.77.abcdef", **fields})
