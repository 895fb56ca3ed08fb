"""The capability ``slots``: leases are compared with the reports of servers, and holders get notes."""

from __future__ import annotations

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.slots.helpers import (
    LONG,
    MODEL,
    OTHER_MODEL,
    add,
    check_stale,
    glance,
    inspect_pool,
    report_observation,
    report_twice,
    running,
    serve,
    take,
    take_over,
)
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Left, SlotLease


class SlotReconcileSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests of `SlotPool.reconcile`, ``leave`` and ``late``."""

    async def test_no_answer(self, bench: Bench) -> None:
        """A server that does not answer gets no jobs until it does, and its jobs keep their leases (C23; fault H4)."""
        await serve(bench, slots=2)
        (lease,) = await running(bench, "job-1")
        assert await report_observation(bench, None) == []
        endpoint = await glance(bench)
        assert (endpoint.healthy, endpoint.assigned) == (False, 1)
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG) == ()
        assert (await bench.slots.renew(lease, ttl=LONG))[0] is not None
        assert await report_observation(bench, 1) == []
        await take(bench)

    async def test_unknown_endpoint(self, bench: Bench) -> None:
        """A report about an unknown endpoint changes nothing, and is no error."""
        assert await report_observation(bench, 3) == []
        assert await report_observation(bench, None, server="s9") == []
        assert (await inspect_pool(bench)).endpoints == ()

    async def test_without_reports_always_well(self, bench: Bench) -> None:
        """An endpoint with ``reports=False`` always counts as healthy (C12)."""
        await add(bench, reports=False)
        assert await report_observation(bench, None) == []
        assert (await glance(bench)).healthy

    async def test_work_without_a_lease(self, bench: Bench) -> None:
        """A server with more jobs than leases is healthy once that number stops growing (fault H9)."""
        for server, last in (("s1", 2), ("s2", 1)):
            await add(bench, server, 2)
            assert await report_observation(bench, 1, server=server) == []
            assert await report_observation(bench, 1, server=server) == []
            assert not (await glance(bench, server)).healthy, "no time has passed"
            await bench.advance(bench.short)
            await report_observation(bench, 2, server=server)
            assert not (await glance(bench, server)).healthy, "the number has grown"
            await bench.advance(bench.short)
            await report_observation(bench, last, server=server)
            assert (await glance(bench, server)).healthy

    async def test_work_of_holders_that_come_back(self, bench: Bench) -> None:
        """After a loss of the pool, a server is healthy once leases cover its jobs (fault H9; C23)."""
        await serve(bench, slots=2)
        await running(bench, "job-1")
        await report_observation(bench, None)
        await report_observation(bench, 2)
        assert not (await glance(bench)).healthy
        await report_observation(bench, 1)
        assert (await glance(bench)).healthy

    async def test_direct_traffic_does_no_harm(self, bench: Bench) -> None:
        """A healthy server with jobs of other clients stays healthy and keeps its leases (C2; fault H8)."""
        await serve(bench, slots=2)
        await running(bench, "job-1")
        for active in (9, 5, 7):
            assert await report_observation(bench, active) == []
            assert (await glance(bench)).healthy
            await bench.advance(bench.short)

    async def test_missed_twice(self, bench: Bench) -> None:
        """A lease ends if its server ran nothing in two reports with some time between (C22, C23; fault H4)."""
        await serve(bench, slots=2)
        (assigned,) = await running(bench, "job-1")
        (detached,) = await running(bench, "job-2")
        await bench.slots.detach(detached, ttl=LONG)
        assert await report_observation(bench, 0) == []
        assert await report_observation(bench, 0) == [], "the second report came too early"
        assert (await glance(bench)).held == 2
        await bench.advance(bench.short)
        assert await report_observation(bench, 0) == ["job-1", "job-2"]
        await check_stale(bench, assigned)
        await check_stale(bench, detached)
        assert (await glance(bench)).free == 2

    async def test_spacing_counts_from_the_first(self, bench: Bench) -> None:
        """Frequent reports end a lease once the first of them is ``settled`` seconds old (C22)."""
        await serve(bench)
        await running(bench, "job-1")
        for _ in range(4):
            assert await report_observation(bench, 0, settled=2 * bench.short) == []
            await bench.advance(bench.short / 2)
        assert await report_observation(bench, 0, settled=2 * bench.short) == ["job-1"]

    async def test_fresh_leases_are_not_cleared(self, bench: Bench) -> None:
        """A lease acquired between two reports of an idle server is kept (C22; FIX-C5, fault H4)."""
        await serve(bench)
        (before,) = await running(bench, "job-1")
        await report_observation(bench, 0)
        await bench.slots.release(before)
        await running(bench, "job-1")
        await bench.advance(bench.short)
        assert await report_observation(bench, 0) == [], "a new lease was ended by an older report"
        await bench.advance(bench.short)
        assert await report_observation(bench, 0) == ["job-1"]

    async def test_a_new_holder_between(self, bench: Bench) -> None:
        """A lease taken over between two reports is kept: its token is new (C22; FIX-C5, fault H4)."""
        await serve(bench, slots=2)
        await running(bench, "job-1")
        await report_observation(bench, 0)
        await take_over(bench)
        await bench.advance(bench.short)
        assert await report_twice(bench, 0) == ["job-1"]

    async def test_renewals_hide_nothing(self, bench: Bench) -> None:
        """A renewed lease ends all the same if its server has lost the job (C22, C23; fault H4)."""
        await serve(bench)
        (lease,) = await running(bench, "job-1")
        await report_observation(bench, 0)
        await bench.advance(bench.short)
        await bench.slots.renew(lease, ttl=LONG)
        assert await report_observation(bench, 0) == ["job-1"]

    async def test_the_contrary_between(self, bench: Bench) -> None:
        """After a report that includes the job, two reports without it must follow to end its lease (C22; fault H4)."""
        await serve(bench)
        await running(bench, "job-1")
        await report_observation(bench, 0)
        await bench.advance(bench.short)
        await report_observation(bench, 1)
        assert await report_twice(bench, 0) == ["job-1"]

    async def test_silence_is_not_the_contrary(self, bench: Bench) -> None:
        """Two reports without a job end its lease, even with no answer between them (C23; fault H4)."""
        await serve(bench)
        await running(bench, "job-1")
        await report_observation(bench, 0)
        await bench.advance(bench.short)
        assert await report_observation(bench, None) == []
        assert await report_observation(bench, 0) == ["job-1"]

    async def test_by_name(self, bench: Bench) -> None:
        """If a report names its jobs, the leases of all other jobs count as missed (C22; fault H3)."""
        await serve(bench, slots=3)
        await running(bench, "job-1", "job-2", "job-3")
        await report_observation(bench, 3, "job-1", "job-3", "another job")
        await bench.advance(bench.short)
        assert await report_observation(bench, 3, "job-3", "another job", "more") == ["job-2"]
        await bench.advance(bench.short)
        assert await report_observation(bench, 3, "job-3") == ["job-1"]
        assert {lease.job for lease in (await inspect_pool(bench)).leases} == {"job-3"}

    async def test_equal_looks(self, bench: Bench) -> None:
        """A lease ends only if both reports without its job have the same number of jobs (C22; fault H4)."""
        await serve(bench, slots=3)
        await running(bench, "job-1", "job-2")
        await report_observation(bench, 2, "job-2", "other")
        await bench.advance(bench.short)
        assert await report_observation(bench, 1, "job-2") == []
        await bench.advance(bench.short)
        assert await report_observation(bench, 1, "job-2") == ["job-1"]

    async def test_fewer_than_held(self, bench: Bench) -> None:
        """If a report only counts jobs, as many expired leases as it lacks are missed, oldest first (C22, C23)."""
        await serve(bench, slots=5)
        first, second, third, _ = await running(bench, "job-1", "job-2", "job-3", "job-4")
        await take(bench)
        leases = (third, bench.short), (first, 2 * bench.short), (second, 3 * bench.short)
        for lease, ttl in leases:
            await bench.slots.assign((lease, lease.job or ""), ttl=ttl)
        await bench.advance(4 * bench.short)
        assert (await glance(bench)).overdue == 3
        await report_observation(bench, 2)
        await bench.advance(bench.short)
        assert await report_observation(bench, 2) == ["job-1", "job-3"], (
            "two of four jobs are missing"
        )
        await bench.advance(bench.short)
        assert await report_observation(bench, 2) == []
        assert {lease.job for lease in (await inspect_pool(bench)).leases} == {
            "job-2",
            "job-4",
            None,
        }

    async def test_those_in_time_are_not_missed(self, bench: Bench) -> None:
        """A report with fewer jobs ends no unexpired lease: a job may not have arrived yet (C22)."""
        await serve(bench, slots=2)
        await running(bench, "job-1", "job-2")
        for _ in range(3):
            assert await report_observation(bench, 1) == []
            await bench.advance(bench.short)

    async def test_overdue_and_on_the_server(self, bench: Bench) -> None:
        """An expired lease is kept as long as its server runs the job (OPEN-C3; fault H3)."""
        await serve(bench, slots=2)
        (by_number, by_name) = await running(bench, "job-1", "job-2", ttl=bench.short)
        for _ in range(3):
            await bench.advance(bench.short)
            assert await report_observation(bench, 2) == []
            assert await report_observation(bench, 2, "job-1", "job-2") == []
        assert await bench.slots.acquire(MODEL, "h2", ttl=LONG) == ()
        assert (await bench.slots.renew(by_number, by_name, ttl=LONG)).count(None) == 0

    async def test_slots_without_a_job_are_not_missed(self, bench: Bench) -> None:
        """A report never ends an unassigned lease, because its job was not sent yet (C22; FIX-C5)."""
        await serve(bench)
        (lease,) = await take(bench)
        for _ in range(3):
            assert await report_observation(bench, 0) == []
            await bench.advance(bench.short)
        assert (await bench.slots.renew(lease, ttl=LONG))[0] is not None

    async def test_one_endpoint_at_a_time(self, bench: Bench) -> None:
        """A report about one endpoint does not affect the leases of others (C22; fault H7)."""
        await serve(bench, "s1")
        await serve(bench, "s2")
        await serve(bench, "s1", model=OTHER_MODEL)
        await running(bench, "job-1", "job-2")
        await running(bench, "job-3", model=OTHER_MODEL)
        await report_observation(bench, 0, server="s2")
        await bench.advance(bench.short)
        assert await report_observation(bench, 0, server="s2") == ["job-2"]
        assert {lease.job for lease in (await inspect_pool(bench)).leases} == {"job-1", "job-3"}

    async def test_the_last_of_a_removed_one(self, bench: Bench) -> None:
        """A removed endpoint is still reconciled, and is deleted with its last lease (fault H7)."""
        await serve(bench)
        await running(bench, "job-1")
        await bench.slots.remove(MODEL, "s1")
        assert await report_twice(bench, 0) == ["job-1"]
        assert (await inspect_pool(bench)).endpoints == ()

    async def test_a_note_for_the_holder(self, bench: Bench) -> None:
        """Every answer about a lease contains the last note that was left for it (C7)."""
        await serve(bench, slots=2)
        (lease,) = await running(bench, "job-1")
        assert await _leave(bench, lease, b'{"status": "early"}') is Left.TAKEN
        assert await _leave(bench, lease, b'{"text": "\xc3\xa9\\u0000"}') is Left.TAKEN
        leases = [
            *await bench.slots.renew(lease, ttl=LONG),
            *await bench.slots.renew(lease, ttl=LONG),
            *await bench.slots.detach(lease, ttl=LONG),
            *await bench.slots.assign((lease, "job-1"), ttl=LONG),
        ]
        assert {lease and lease.note for lease in leases} == {b'{"text": "\xc3\xa9\\u0000"}'}
        assert await bench.slots.late(MODEL, "job-1") == ()
        await inspect_pool(bench)

    async def test_a_note_outlives_its_holder(self, bench: Bench) -> None:
        """The note of a job's lease is kept when another holder takes it over (C7, C23; fault H2)."""
        await serve(bench, slots=2)
        (lease,) = await running(bench, "job-1")
        await _leave(bench, lease, b'"result"')
        _, over = await take_over(bench)
        assert over.note == b'"result"'

    async def test_a_note_that_comes_late(self, bench: Bench) -> None:
        """A note with a stale token is stored as late, and replaces no other note (OPEN-C4; fault H3)."""
        await serve(bench, slots=2)
        (before,) = await running(bench, "job-1")
        _, over = await take_over(bench)
        assert await _leave(bench, over, b'"good"') is Left.TAKEN
        assert await _leave(bench, before, b'"late"') is Left.LATE
        assert await bench.slots.leave(MODEL, "job-1", "nonsense", b'"later"') is Left.LATE
        (lease,) = await bench.slots.renew(over, ttl=LONG)
        assert lease is not None
        assert lease.note == b'"good"'
        assert await bench.slots.late(MODEL, "job-1") == (b'"late"', b'"later"')
        assert await bench.slots.late(OTHER_MODEL, "job-1") == ()

    async def test_a_note_when_all_is_over(self, bench: Bench) -> None:
        """A note for a job without a lease is late; a released lease loses its note (C7; fault H3)."""
        await serve(bench)
        (lease,) = await running(bench, "job-1")
        await _leave(bench, lease, b'"fetched"')
        await bench.slots.release(lease)
        assert await bench.slots.late(MODEL, "job-1") == ()
        assert await _leave(bench, lease, b'"late"') is Left.LATE
        assert await bench.slots.late(MODEL, "job-1") == (b'"late"',)

    async def test_a_note_that_was_not_fetched(self, bench: Bench) -> None:
        """If a lease expires or ends by a report, its note is stored as late: it may be a result (C7, C26)."""
        await serve(bench)
        (lease,) = await running(bench, "job-1")
        await _leave(bench, lease, b'"of a server"')
        assert await report_twice(bench, 0) == ["job-1"]
        assert await bench.slots.late(MODEL, "job-1") == (b'"of a server"',)
        await add(bench, reports=False)
        (lease,) = await running(bench, "job-2", ttl=bench.short)
        await _leave(bench, lease, b'"of time"')
        await bench.advance(bench.short)
        assert await bench.slots.late(MODEL, "job-2") == (b'"of time"',)

    async def test_late_notes_are_bounded(self, bench: Bench) -> None:
        """The last 8 late notes of a job are kept, and the last 1,000 of the pool (fault H3)."""
        for number in range(10):
            await bench.slots.leave(MODEL, "job-1", "x", b"%d" % number)
        assert await bench.slots.late(MODEL, "job-1") == tuple(b"%d" % n for n in range(2, 10))
        for number in range(995):
            await bench.slots.leave(OTHER_MODEL, f"job-{number}", "x", b"1")
        assert await bench.slots.late(MODEL, "job-1") == tuple(b"%d" % n for n in range(5, 10))
        assert await bench.slots.late(OTHER_MODEL, "job-0") == (b"1",)

    async def test_large_late_notes(self, bench: Bench) -> None:
        """At most 16 MiB of late notes are kept; the oldest are deleted first (fault H3)."""
        note = b'"' + b"x" * (250 * 1024) + b'"'
        for number in range(66):
            await bench.slots.leave(MODEL, f"job-{number}", "x", note)
        retained = [
            number for number in range(66) if await bench.slots.late(MODEL, f"job-{number}")
        ]
        assert retained == list(range(1, 66))

    @needs("manual_clock")
    async def test_late_notes_end(self, bench: Bench) -> None:
        """A late note is deleted after an hour (fault H3)."""
        await bench.slots.leave(MODEL, "job-1", "x", b"1")
        await bench.advance(1800)
        await bench.slots.leave(MODEL, "job-1", "x", b"2")
        assert await bench.slots.late(MODEL, "job-1") == (b"1", b"2")
        await bench.advance(1800)
        assert await bench.slots.late(MODEL, "job-1") == (b"2",)
        await bench.advance(1800)
        assert await bench.slots.late(MODEL, "job-1") == ()


async def _leave(bench: Bench, lease: SlotLease, note: bytes) -> Left:
    return await bench.slots.leave(lease.model, lease.job or "", lease.token, note)
