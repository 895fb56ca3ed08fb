"""The capability ``slots``: leases are compared with the reports of servers, and notes are left for holders."""

from __future__ import annotations

from taskqueue_conformance.bench import Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.slots.helpers import LONG, MODEL, OTHER_MODEL
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Left, SlotLease


class SlotReconcileSuite(Harness, needs=(Capability.SLOTS,)):
    """Tests of `SlotPool.reconcile`, ``leave`` and ``late``."""

    async def test_no_answer(self, bench: Bench) -> None:
        """A server that does not answer gets no jobs until it answers; its jobs keep their leases (C23; fault H4)."""
        (lease,) = await bench.pool.serving("job-1", slots=2)
        assert await bench.pool.report(None) == []
        await bench.pool.expect(healthy=False, assigned=1)
        await bench.pool.none_free()
        await bench.pool.renew(lease)
        assert await bench.pool.report(1) == []
        await bench.pool.take()

    async def test_unknown_endpoint(self, bench: Bench) -> None:
        """A report about an unknown endpoint changes nothing, and is not an error."""
        assert await bench.pool.report(3) == []
        assert await bench.pool.report(None, server="s9") == []
        assert await bench.pool.servers() == []

    async def test_without_reports_always_well(self, bench: Bench) -> None:
        """An endpoint with ``reports=False`` always counts as healthy (C12)."""
        await bench.pool.add(reports=False)
        assert await bench.pool.report(None) == []
        await bench.pool.expect(healthy=True)

    async def test_work_without_a_lease(self, bench: Bench) -> None:
        """A server with more jobs than leases is healthy once its number of jobs stops growing (fault H9)."""
        for server, last in (("s1", 2), ("s2", 1)):
            await bench.pool.add(server, 2)
            assert await bench.pool.report(1, server=server) == []
            assert await bench.pool.report(1, server=server) == []
            await bench.pool.expect(
                server, healthy=False
            )  # no time has passed since the first report
            await bench.advance(bench.short)
            await bench.pool.report(2, server=server)
            await bench.pool.expect(server, healthy=False)  # the number of jobs has grown
            await bench.advance(bench.short)
            await bench.pool.report(last, server=server)
            await bench.pool.expect(server, healthy=True)

    async def test_work_of_holders_that_come_back(self, bench: Bench) -> None:
        """After the pool was lost, a server is healthy once its jobs have leases again (fault H9; C23)."""
        await bench.pool.serving("job-1", slots=2)
        await bench.pool.report(None)
        await bench.pool.report(2)
        await bench.pool.expect(healthy=False)
        await bench.pool.report(1)
        await bench.pool.expect(healthy=True)

    async def test_direct_traffic_does_no_harm(self, bench: Bench) -> None:
        """A healthy server with jobs of other clients stays healthy and keeps its leases (C2; fault H8)."""
        await bench.pool.serving("job-1", slots=2)
        for active in (9, 5, 7):
            assert await bench.pool.report(active) == []
            await bench.pool.expect(healthy=True)
            await bench.advance(bench.short)

    async def test_missed_twice(self, bench: Bench) -> None:
        """A lease ends if two reports, some time apart, show no jobs on its server (C22, C23; fault H4)."""
        (assigned,) = await bench.pool.serving("job-1", slots=2)
        (detached,) = await bench.pool.running("job-2")
        await bench.pool.detach(detached)
        assert await bench.pool.report(0) == []
        assert await bench.pool.report(0) == [], "a report that comes too early must end no lease"
        await bench.pool.expect(held=2)
        await bench.advance(bench.short)
        assert await bench.pool.report(0) == ["job-1", "job-2"]
        await bench.pool.check_stale(assigned, detached)
        await bench.pool.expect(free=2)

    async def test_spacing_counts_from_the_first(self, bench: Bench) -> None:
        """Frequent reports without a job end its lease ``settled`` seconds after the first of these reports (C22)."""
        await bench.pool.serving("job-1")
        for _ in range(4):
            assert await bench.pool.report(0, settled=2 * bench.short) == []
            await bench.advance(bench.short / 2)
        assert await bench.pool.report(0, settled=2 * bench.short) == ["job-1"]

    async def test_fresh_leases_are_not_cleared(self, bench: Bench) -> None:
        """A lease acquired between two reports of an idle server is kept (C22; FIX-C5, fault H4)."""
        (before,) = await bench.pool.serving("job-1")
        await bench.pool.report(0)
        await bench.slots.release(before)
        await bench.pool.running("job-1")
        await bench.advance(bench.short)
        assert await bench.pool.report(0) == [], "a new lease was ended by an older report"
        await bench.advance(bench.short)
        assert await bench.pool.report(0) == ["job-1"]

    async def test_a_new_holder_between(self, bench: Bench) -> None:
        """A lease that is taken over between two reports is kept, because its token is new (C22; FIX-C5, fault H4)."""
        await bench.pool.serving("job-1", slots=2)
        await bench.pool.report(0)
        await bench.pool.take_over()
        await bench.advance(bench.short)
        assert await bench.pool.report_twice(0) == ["job-1"]

    async def test_assigned_again_between(self, bench: Bench) -> None:
        """Assigning a lease again makes earlier reports that lack its job irrelevant (C11, C22; fault H4)."""
        (lease,) = await bench.pool.serving("job-1")
        await bench.pool.report(0)
        await bench.advance(bench.short)
        (again,) = await bench.slots.assign((lease, "job-1"), ttl=LONG)
        assert again is not None
        assert again.token == lease.token
        assert await bench.pool.report_twice(0) == ["job-1"]

    async def test_renewals_hide_nothing(self, bench: Bench) -> None:
        """A renewal does not keep the lease of a job that its server has lost (C22, C23; fault H4)."""
        (lease,) = await bench.pool.serving("job-1")
        await bench.pool.report(0)
        await bench.advance(bench.short)
        await bench.slots.renew(lease, ttl=LONG)
        assert await bench.pool.report(0) == ["job-1"]

    async def test_the_contrary_between(self, bench: Bench) -> None:
        """After a report with the job, it takes two more reports without the job to end its lease (C22; fault H4)."""
        await bench.pool.serving("job-1")
        await bench.pool.report(0)
        await bench.advance(bench.short)
        await bench.pool.report(1)
        assert await bench.pool.report_twice(0) == ["job-1"]

    async def test_silence_between(self, bench: Bench) -> None:
        """Reports from before a server went silent do not count: it takes two new ones of each kind (U26; fault H4)."""
        await bench.pool.serving("job-1")
        await bench.pool.report(0)
        await bench.pool.add("s2")
        await bench.pool.report(1, server="s2")
        await bench.advance(bench.short)
        assert await bench.pool.report(None) == []
        await bench.pool.report(None, server="s2")
        assert await bench.pool.report_twice(0) == ["job-1"]
        await bench.pool.report(1, server="s2")
        await bench.pool.expect("s2", healthy=False)
        await bench.advance(bench.short)
        await bench.pool.report(1, server="s2")
        await bench.pool.expect("s2", healthy=True)

    async def test_by_name(self, bench: Bench) -> None:
        """If reports name the jobs of a server, a lease ends if two of them do not name its job (C22; fault H3)."""
        await bench.pool.serving("job-1", "job-2", "job-3", slots=3)
        await bench.pool.report(3, "job-1", "job-3", "another job")
        await bench.advance(bench.short)
        assert await bench.pool.report(3, "job-3", "another job", "more") == ["job-2"]
        await bench.advance(bench.short)
        assert await bench.pool.report(3, "job-3") == ["job-1"]
        assert set(await bench.pool.jobs()) == {"job-3"}

    async def test_equal_looks(self, bench: Bench) -> None:
        """A lease ends only if both reports without its job give the same number of jobs (C22; fault H4)."""
        await bench.pool.serving("job-1", "job-2", slots=3)
        await bench.pool.report(2, "job-2", "other")
        await bench.advance(bench.short)
        assert await bench.pool.report(1, "job-2") == []
        await bench.advance(bench.short)
        assert await bench.pool.report(1, "job-2") == ["job-1"]

    async def test_fewer_than_held(self, bench: Bench) -> None:
        """If two reports show fewer jobs than leases, the leases that expired first end (C22, C23)."""
        jobs = ("job-1", "job-2", "job-3", "job-4")
        first, second, third, _ = await bench.pool.serving(*jobs, slots=5)
        await bench.pool.take()
        leases = (third, bench.short), (first, 2 * bench.short), (second, 3 * bench.short)
        for lease, ttl in leases:
            await bench.pool.assign(lease, lease.job or "", ttl)
        await bench.advance(4 * bench.short)
        await bench.pool.expect(overdue=3)
        await bench.pool.report(2)
        await bench.advance(bench.short)
        assert await bench.pool.report(2) == ["job-1", "job-3"], (
            "the two leases that expired first must end"
        )
        await bench.advance(bench.short)
        assert await bench.pool.report(2) == []
        assert set(await bench.pool.jobs()) == {"job-2", "job-4", None}

    async def test_those_in_time_are_not_missed(self, bench: Bench) -> None:
        """If a server has jobs, but fewer than leases, no unexpired lease ends: its job may be on its way (C22)."""
        await bench.pool.serving("job-1", "job-2", slots=2)
        for _ in range(3):
            assert await bench.pool.report(1) == []
            await bench.advance(bench.short)

    async def test_overdue_and_on_the_server(self, bench: Bench) -> None:
        """An expired lease is kept as long as its server runs the job (OPEN-C3; fault H3)."""
        (by_number, by_name) = await bench.pool.serving("job-1", "job-2", slots=2, ttl=bench.short)
        for _ in range(3):
            await bench.advance(bench.short)
            assert await bench.pool.report(2) == []
            assert await bench.pool.report(2, "job-1", "job-2") == []
        await bench.pool.none_free()
        assert None not in await bench.slots.renew(by_number, by_name, ttl=LONG)

    async def test_slots_without_a_job_are_not_missed(self, bench: Bench) -> None:
        """A report without jobs ends no unassigned lease, because no job has been sent for it yet (C22; FIX-C5)."""
        await bench.pool.serve()
        (lease,) = await bench.pool.take()
        for _ in range(3):
            assert await bench.pool.report(0) == []
            await bench.advance(bench.short)
        await bench.pool.renew(lease)

    async def test_one_endpoint_at_a_time(self, bench: Bench) -> None:
        """A report about one endpoint does not affect the leases of other endpoints (C22; fault H7)."""
        await bench.pool.serve("s1")
        await bench.pool.serve("s2")
        await bench.pool.serve("s1", model=OTHER_MODEL)
        await bench.pool.running("job-1", "job-2")
        await bench.pool.running("job-3", model=OTHER_MODEL)
        await bench.pool.report(0, server="s2")
        await bench.advance(bench.short)
        assert await bench.pool.report(0, server="s2") == ["job-2"]
        assert set(await bench.pool.jobs()) == {"job-1", "job-3"}

    async def test_the_last_of_a_removed_one(self, bench: Bench) -> None:
        """A removed endpoint is still reconciled, and is deleted when its last lease ends (fault H7)."""
        await bench.pool.serving("job-1")
        await bench.slots.remove(MODEL, "s1")
        assert await bench.pool.report_twice(0) == ["job-1"]
        assert await bench.pool.servers() == []

    async def test_a_note_for_the_holder(self, bench: Bench) -> None:
        """Every call that returns a lease to its holder also returns the last note for the holder (C7)."""
        (lease,) = await bench.pool.serving("job-1", slots=2)
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
        await bench.pool.inspect()

    async def test_a_note_outlives_its_holder(self, bench: Bench) -> None:
        """A lease of a job keeps its note when another holder takes the lease over (C7, C23; fault H2)."""
        (lease,) = await bench.pool.serving("job-1", slots=2)
        await _leave(bench, lease, b'"result"')
        _, over = await bench.pool.take_over()
        assert over.note == b'"result"'

    async def test_a_note_outlives_its_lease(self, bench: Bench) -> None:
        """If a lease with a note ends without a release, the job's next lease is marked ``resumed`` (U26; fault H2)."""
        (lease,) = await bench.pool.serving("job-1")
        await _leave(bench, lease, b'"sent"')
        assert await bench.pool.report_twice(0) == ["job-1"]
        (again,) = await bench.pool.running("job-1")
        assert (again.resumed, again.note) == (True, None)
        assert await bench.slots.late(MODEL, "job-1") == (b'"sent"',)
        await bench.slots.release(again)
        (other,) = await bench.pool.running("job-2")
        assert not other.resumed

    async def test_a_note_that_comes_late(self, bench: Bench) -> None:
        """A note with a stale token is stored as late, and replaces no other note (OPEN-C4; fault H3)."""
        (before,) = await bench.pool.serving("job-1", slots=2)
        _, over = await bench.pool.take_over()
        assert await _leave(bench, over, b'"good"') is Left.TAKEN
        assert await _leave(bench, before, b'"late"') is Left.LATE
        assert await bench.slots.leave(MODEL, "job-1", "nonsense", b'"later"') is Left.LATE
        assert (await bench.pool.renew(over)).note == b'"good"'
        assert await bench.slots.late(MODEL, "job-1") == (b'"late"', b'"later"')
        assert await bench.slots.late(OTHER_MODEL, "job-1") == ()

    async def test_a_note_when_all_is_over(self, bench: Bench) -> None:
        """A note for a job without a lease is stored as late; a released lease loses its note (C7; fault H3)."""
        (lease,) = await bench.pool.serving("job-1")
        await _leave(bench, lease, b'"fetched"')
        await bench.slots.release(lease)
        assert await bench.slots.late(MODEL, "job-1") == ()
        assert await _leave(bench, lease, b'"late"') is Left.LATE
        assert await bench.slots.late(MODEL, "job-1") == (b'"late"',)

    async def test_a_note_that_was_not_fetched(self, bench: Bench) -> None:
        """If a lease expires or is ended by a report, its note, which may be a result, is stored as late (C7, C26)."""
        (lease,) = await bench.pool.serving("job-1")
        await _leave(bench, lease, b'"of a server"')
        assert await bench.pool.report_twice(0) == ["job-1"]
        assert await bench.slots.late(MODEL, "job-1") == (b'"of a server"',)
        await bench.pool.add(reports=False)
        (lease,) = await bench.pool.running("job-2", ttl=bench.short)
        await _leave(bench, lease, b'"of time"')
        await bench.advance(bench.short)
        assert await bench.slots.late(MODEL, "job-2") == (b'"of time"',)

    async def test_late_notes_are_bounded(self, bench: Bench) -> None:
        """The last 8 late notes of each job are kept, and the last 1,000 late notes of the pool (fault H3)."""
        for number in range(10):
            await bench.slots.leave(MODEL, "job-1", "x", b"%d" % number)
        assert await bench.slots.late(MODEL, "job-1") == tuple(b"%d" % n for n in range(2, 10))
        for number in range(995):
            await bench.slots.leave(OTHER_MODEL, f"job-{number}", "x", b"1")
        assert await bench.slots.late(MODEL, "job-1") == tuple(b"%d" % n for n in range(5, 10))
        assert await bench.slots.late(OTHER_MODEL, "job-0") == (b"1",)

    async def test_large_late_notes(self, bench: Bench) -> None:
        """At most 16 MiB of late notes are kept; the oldest notes are deleted first (fault H3)."""
        note = b'"' + b"x" * (250 * 1024) + b'"'
        for number in range(66):
            await bench.slots.leave(MODEL, f"job-{number}", "x", note)
        kept = [n for n in range(66) if await bench.slots.late(MODEL, f"job-{n}")]
        assert kept == list(range(1, 66))

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
