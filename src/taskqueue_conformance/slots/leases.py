"""The capability ``slots``: each slot has at most one holder, which is identified by a token."""

from __future__ import annotations

import msgspec

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.slots.helpers import LONG, MODEL, OTHER_MODEL, lost_lease
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Left, Permit


class SlotLeasesSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests of `SlotPool.acquire`, ``assign``, ``detach``, ``renew`` and ``release``."""

    async def test_as_many_as_there_are(self, bench: Bench) -> None:
        """Each slot is granted once; if no slot is free, ``acquire`` returns nothing (B6, B9, C20; FIX-C4)."""
        await bench.pool.serve(slots=3)
        first = await bench.pool.take(2)
        second = await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=5)
        assert len(second) == 1
        await bench.pool.none_free("h1", limit=5)
        leases = [*first, *second]
        assert len({lease.token for lease in leases}) == 3, "two leases have the same token"
        assert [lease.fence for lease in leases] == sorted({lease.fence for lease in leases})
        for lease, holder in zip(leases, ["h1", "h1", "h2"], strict=True):
            assert (lease.model, lease.server) == (MODEL, "s1")
            assert lease.url == "http://s1.example/run"
            assert (lease.holder, lease.state, lease.job) == (holder, Permit.UNASSIGNED, None)
        await bench.pool.expect(held=3, free=0, unassigned=3)

    async def test_unknown_models_have_none(self, bench: Bench) -> None:
        """Acquiring a slot of an unregistered model returns nothing, and is not an error (B9)."""
        await bench.pool.serve()
        assert await bench.slots.acquire(OTHER_MODEL, "h1", ttl=LONG) == ()
        assert await bench.pool.servers(OTHER_MODEL) == []

    async def test_states_of_a_lease(self, bench: Bench) -> None:
        """A lease keeps its token while it is unassigned, then assigned to a job, then detached (B8)."""
        await bench.pool.serve(slots=2)
        (lease,) = await bench.pool.take()
        bound = await bench.pool.assign(lease, "job-1")
        assert (bound.state, bound.job, bound.resumed) == (Permit.ASSIGNED, "job-1", False)
        free = await bench.pool.detach(bound)
        assert (free.state, free.job, free.token) == (Permit.DETACHED, "job-1", lease.token)
        await bench.pool.expect(unassigned=0, assigned=0, detached=1, free=1)
        (there,) = (await bench.pool.inspect()).leases
        assert there == msgspec.structs.replace(free, token="")

    async def test_only_jobs_run_on_by_themselves(self, bench: Bench) -> None:
        """A lease without a job cannot be detached (B8)."""
        await bench.pool.serve()
        (lease,) = await bench.pool.take()
        assert await bench.slots.detach(lease, ttl=LONG) == (None,)
        await bench.pool.expect(unassigned=1)

    async def test_release_gives_back(self, bench: Bench) -> None:
        """A lease can be released in any state, but only once; the release frees its slot (B7; OPEN-C4, FIX-C8)."""
        await bench.pool.serve(slots=3)
        leases = await bench.pool.take(3)
        await bench.slots.assign((leases[1], "job-1"), (leases[2], "job-2"), ttl=LONG)
        await bench.pool.detach(leases[2])
        assert await bench.slots.release(*leases) == (True,) * 3
        assert await bench.slots.release(*leases) == (False,) * 3
        await bench.pool.expect(free=3)
        await bench.pool.take(3)

    async def test_a_released_token_is_stale(self, bench: Bench) -> None:
        """The token of a released lease changes nothing for the next holder (OPEN-C4; C23)."""
        (before,) = await bench.pool.serving("job-1")
        await bench.slots.release(before)
        (now,) = await bench.pool.running("job-2", holder="h2")
        assert now.fence > before.fence
        await bench.pool.check_stale(before)
        await bench.pool.renew(now)

    async def test_made_up_tokens(self, bench: Bench) -> None:
        """A token that was never issued, or that was altered, is stale (OPEN-C4)."""
        await bench.pool.serve()
        (lease,) = await bench.pool.take()
        epoch, fence, random = lease.token.split(".")
        strange = ["", ".", "x", "1.2.3", "é.1.x", "a.-1.b", "..", "0" * 300, lease.token + "0"]
        halves = [f"{epoch}.{fence}.", f"{epoch}.{fence}.{random[:-1]}", f"{epoch}..{random}"]
        for token in strange + halves:
            await bench.pool.check_stale(msgspec.structs.replace(lease, token=token))

    async def test_tokens_are_not_in_the_repr(self, bench: Bench) -> None:
        """The repr of a lease, which may appear in logs, contains neither its token nor its note."""
        (lease,) = await bench.pool.serving("job-1")
        await bench.slots.leave(MODEL, "job-1", lease.token, b'"a note"')
        noted = await bench.pool.renew(lease)
        assert lease.token not in repr(noted)
        assert "a note" not in repr(noted)

    async def test_unassigned_runs_out(self, bench: Bench) -> None:
        """An unassigned lease ends after its ttl, and its token is then stale (C20, C23; fault H2)."""
        await bench.pool.serve()
        (lease,) = await bench.pool.take(ttl=bench.short)
        await bench.pool.none_free()
        await bench.advance(bench.short)
        await bench.pool.check_stale(lease)
        await bench.pool.expect(free=1)
        await bench.pool.take(holder="h2")

    async def test_renewed_in_time(self, bench: Bench) -> None:
        """A lease is kept as long as its holder renews it in time (C21; FIX-C7)."""
        await bench.pool.serve()
        (lease,) = await bench.pool.take(ttl=2 * bench.short)
        for _ in range(4):
            await bench.advance(bench.short)
            retained = await bench.pool.renew(lease, ttl=2 * bench.short)
            assert (retained.token, retained.fence) == (lease.token, lease.fence)
            assert retained.expires_at > lease.expires_at
            lease = retained
        await bench.pool.none_free()

    async def test_renewal_shortens_nothing(self, bench: Bench) -> None:
        """A renewal never shortens a lease, whatever its state (B8; C21)."""
        await bench.pool.serve(slots=3)
        (unassigned,) = await bench.pool.take()
        assigned, detached = await bench.pool.running("job-1", "job-2")
        await bench.pool.detach(detached)
        leases = await bench.slots.renew(unassigned, assigned, detached, ttl=bench.short)
        assert all(lease and lease.expires_at > bench.now + LONG / 2 for lease in leases)
        states = [lease and lease.state for lease in leases]
        assert states == [Permit.UNASSIGNED, Permit.ASSIGNED, Permit.DETACHED]

    async def test_jobs_outlive_their_time(self, bench: Bench) -> None:
        """With ``reports=True``, a lease with a job keeps its slot after it expires (OPEN-C3, C23; fault H3)."""
        assigned, detached = await bench.pool.serving("job-1", "job-2", slots=2, ttl=bench.short)
        await bench.pool.detach(detached, ttl=bench.short)
        await bench.advance(3 * bench.short)
        await bench.pool.none_free(limit=2)
        await bench.pool.expect(assigned=1, detached=1, overdue=2, free=0)
        await bench.pool.renew(assigned)
        await bench.pool.expect(overdue=1)
        assert await bench.slots.release(detached) == (True,)

    async def test_time_frees_where_no_server_reports(self, bench: Bench) -> None:
        """With ``reports=False``, a lease with a job ends when it expires (C18, C20; OPEN-C3)."""
        assigned, detached = await bench.pool.serving(
            "job-1", "job-2", slots=2, ttl=bench.short, reports=False
        )
        await bench.pool.detach(detached, ttl=2 * bench.short)
        await bench.advance(bench.short)
        await bench.pool.check_stale(assigned)
        await bench.pool.expect(free=1)
        await bench.advance(bench.short)
        assert len(await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=3)) == 2

    async def test_assigning_again(self, bench: Bench) -> None:
        """Assigning the same job again, after a lost answer, returns the same lease (B8)."""
        await bench.pool.serve(slots=2)
        (lease,) = await bench.pool.take()
        first, again = [await bench.pool.assign(lease, "job-1") for _ in range(2)]
        assert (again.token, again.state, again.resumed) == (first.token, Permit.ASSIGNED, False)
        await bench.pool.detach(lease)
        assert (await bench.pool.assign(lease, "job-1")).state is Permit.ASSIGNED
        await bench.pool.expect(held=1)

    async def test_one_job_for_each_lease(self, bench: Bench) -> None:
        """A lease with a job gets no other job, because the server may already run the first job (B8; fault H1)."""
        (lease,) = await bench.pool.serving("job-1", slots=2)
        assert await bench.slots.assign((lease, "job-2"), ttl=LONG) == (None,)
        assert await bench.pool.jobs() == ["job-1"]

    async def test_a_job_takes_its_slot_over(self, bench: Bench) -> None:
        """Assigning a job that has a lease moves the lease to the new holder, whose own slot is freed (B8, C23)."""
        (before,) = await bench.pool.serving("job-1", slots=2)
        await bench.pool.detach(before)
        fresh, over = await bench.pool.take_over()
        assert (over.resumed, over.holder, over.state) == (True, "h2", Permit.ASSIGNED)
        assert over.fence > max(before.fence, fresh.fence)
        assert over.token not in (before.token, fresh.token)
        await bench.pool.check_stale(before)
        assert await bench.slots.release(fresh) == (False,)
        await bench.pool.expect(assigned=1, free=1)
        assert await bench.slots.release(over) == (True,)

    async def test_taking_over_again(self, bench: Bench) -> None:
        """Repeating a takeover after a lost answer returns the same lease (fault H2)."""
        await bench.pool.serving("job-1", slots=2)
        fresh, over = await bench.pool.take_over()
        again = await bench.pool.assign(fresh, "job-1")
        assert (again.token, again.resumed) == (over.token, True)
        assert await bench.slots.assign((fresh, "job-2"), ttl=LONG) == (None,)

    async def test_takeover_across_servers(self, bench: Bench) -> None:
        """A job that is taken over keeps its server, even if the new slot is on another server (C23; fault H1)."""
        (before,) = await bench.pool.serving("job-1")
        await bench.pool.serve("s2")
        fresh, over = await bench.pool.take_over()
        assert (before.server, fresh.server) == ("s1", "s2")
        assert (over.server, over.url) == ("s1", before.url)
        await bench.pool.expect("s2", free=1)

    async def test_the_same_job_of_two_models(self, bench: Bench) -> None:
        """Jobs of two models may have the same name; each job has a slot of its own (fault H7)."""
        (lease,) = await bench.pool.serving("job-1")
        await bench.pool.serve(model=OTHER_MODEL)
        (two,) = await bench.pool.running("job-1", model=OTHER_MODEL)
        assert not two.resumed
        assert None not in await bench.slots.renew(lease, two, ttl=LONG)

    async def test_a_batch_of_jobs(self, bench: Bench) -> None:
        """A batch of leases is answered in order; a stale lease does not affect the other leases (B8)."""
        await bench.pool.serve(slots=3)
        item, stale, two = await bench.pool.take(3)
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
        """One call of ``acquire`` can release leases and acquire new ones; it ignores stale leases (C19, C20)."""
        lease, two = await bench.pool.serving("job-1", "job-2", slots=2)
        (next_one,) = await bench.slots.acquire(MODEL, "h1", ttl=LONG, releasing=[lease], limit=2)
        assert next_one.state is Permit.UNASSIGNED
        assert await bench.slots.acquire(MODEL, "h1", ttl=LONG, releasing=[lease]) == ()
        assert await bench.slots.acquire(MODEL, "h1", ttl=LONG, releasing=[two], limit=0) == ()
        await bench.pool.expect(unassigned=1, assigned=0, free=1)

    async def test_idle_slots_are_taken(self, bench: Bench) -> None:
        """If no slot is free, slots unassigned for over ``idle`` seconds are taken from others, oldest first (B9)."""
        await bench.pool.serve(slots=4)
        (lease,) = await bench.pool.take(holder="h2")
        (old,) = await bench.pool.take()
        (busy,) = await bench.pool.running("job-1")
        await bench.advance(2 * bench.short)
        await bench.slots.renew(old, ttl=2 * LONG)
        (young,) = await bench.pool.take()
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG, idle=100 * bench.short) == ()
        (taken,) = await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=3, idle=bench.short)
        assert (taken.holder, taken.state) == ("h2", Permit.UNASSIGNED)
        assert taken.token != old.token
        await bench.pool.check_stale(old)
        leases = await bench.slots.renew(lease, young, busy, taken, ttl=LONG)
        assert None not in leases, (
            "a lease was taken although it is the caller's or recent, or has a job"
        )

    async def test_free_slots_before_idle_ones(self, bench: Bench) -> None:
        """With ``idle``, free slots are granted first, then idle slots of other holders (B9)."""
        await bench.pool.serve(slots=4)
        older, _ = idle = await bench.pool.take(2)
        await bench.advance(2 * bench.short)
        assert len(await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=2, idle=bench.short)) == 2
        assert None not in await bench.slots.renew(*idle, ttl=LONG)
        assert len(await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=1, idle=bench.short)) == 1
        leases = await bench.slots.renew(*idle, ttl=LONG)
        assert [lease is None for lease in leases] == [True, False]
        await bench.pool.check_stale(older)

    async def test_idle_slots_where_nothing_is_given(self, bench: Bench) -> None:
        """No idle slots are taken if the endpoint is unhealthy or has too many leases (B9; fault H7)."""
        await bench.pool.add(slots=2, reports=False)
        idle = await bench.pool.take(2)
        await bench.advance(2 * bench.short)
        assert not (await bench.pool.add(slots=2)).usable, "no report yet: expected usable=False"
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=2, idle=bench.short) == ()
        await bench.pool.serve(slots=1)
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG, limit=2, idle=bench.short) == ()
        assert None not in await bench.slots.renew(*idle, ttl=LONG)

    async def test_leases_of_a_lost_pool(self, bench: Bench) -> None:
        """After the pool was lost, a renewal recreates a job's lease, even without a free slot (C23; fault H9)."""
        (there,) = await bench.pool.serving("job-0")
        for state in (Permit.ASSIGNED, Permit.DETACHED):
            job = f"job-{state}"
            lost = lost_lease(there, state=state, job=job)
            lease = await bench.pool.renew(lost)
            assert (lease.job, lease.state, lease.holder) == (job, state, lost.holder)
            assert lease.token != lost.token
            assert lease.fence > there.fence
            assert bench.now < lease.expires_at < bench.now + 2 * LONG
            again = await bench.pool.renew(lost)
            assert again.token == lease.token, "a repeated renewal must return the same lease"
            assert await bench.slots.leave(MODEL, job, lease.token, b"1") is Left.TAKEN
        await bench.pool.expect(held=3)
        await bench.pool.none_free()
        assert len(await bench.pool.report_twice(0)) == 3

    async def test_what_a_lost_pool_leaves_lost(self, bench: Bench) -> None:
        """A renewal does not recreate every lease of a lost pool (fault H9).

        The lease must have a registered endpoint, and a job that has no other slot.
        """
        (there,) = await bench.pool.serving("job-0")
        lost = (
            lost_lease(there, state=Permit.UNASSIGNED, job=None),
            lost_lease(there),
            lost_lease(there, server="s9", job="job-9"),
            msgspec.structs.replace(there, job="job-9", token=f"{there.token}0"),
        )
        assert await bench.slots.renew(*lost, ttl=LONG) == (None,) * 4
        await bench.pool.check_stale(*lost)

    async def test_only_a_renewal_restores_leases(self, bench: Bench) -> None:
        """After the pool was lost, only ``renew`` accepts the old tokens (fault H9)."""
        (there,) = await bench.pool.serving("job-0")
        lost = lost_lease(there, job="job-1")
        assert await bench.slots.release(lost) == (False,)
        assert await bench.slots.detach(lost, ttl=LONG) == (None,)
        assert await bench.slots.assign((lost, "job-1"), ttl=LONG) == (None,)
        assert await bench.slots.leave(MODEL, "job-1", lost.token, b"1") is Left.LATE
        await bench.pool.expect(held=1)
