"""Lines between partitions: whatever is repeated, reordered or late, each child is released once."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.partitions import after, carry_all, joint, status_of
from taskqueue_conformance.selection import needs
from taskqueue_core.after import INPUTS_TOO_LARGE, UNKNOWN_PARENT, After, TaskRef
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import AT_ONCE, Dependencies, Line, LineKind, Report
from taskqueue_core.consumer.carrier import report_in
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import State


async def apart(bench: Bench) -> Bench:
    """Open a second backend with nothing in it, and return its bench. Its queue is `OTHER`."""
    return bench.on(await bench.harness.open_backend(bench.clock))


async def registered(dependencies: Dependencies, line: Line) -> Report:
    """Register a child, and return the report about its parent."""
    (report,) = await dependencies.register(line)
    assert report is not None, "the partition of the parent did not answer"
    return report


class BlockedLinesSuite(Harness, needs=(Capability.AFTER,)):
    """Tests of the capability ``after`` with many tasks, and with parents in another partition."""

    async def test_many_children(self, bench: Bench) -> None:
        """A parent releases each of its children once, also those beyond the first few (laws 1, 6; U16)."""
        subscription, delivery = await bench.running("parent")
        names = [f"c{number}" for number in range(10 * AT_ONCE)]
        await bench.publish(*names, after=after("parent"))
        await bench.publish("last", after=after(*names, when="ended"))
        await subscription.ack(delivery)
        await carry_all(bench)
        taken = await bench.take(subscription, len(names) + 1)
        assert sorted(ids(taken)) == sorted(names)
        await subscription.ack(*taken)
        await carry_all(bench)
        assert ids(await bench.take(subscription, 9)) == ["last"]

    async def test_as_many_parents_as_allowed(self, bench: Bench) -> None:
        """A task may wait for 1000 others, and gets their results (U16)."""
        names = [f"p{number}" for number in range(LIMITS.parents)]
        subscription = await bench.subscribed(*names)
        inputs = tuple(range(LIMITS.parents))
        await bench.publish("child", after=after(*names, inputs=inputs))
        taken = await bench.take(subscription, LIMITS.parents)
        assert len(taken) == LIMITS.parents
        await subscription.ack(*taken, results=[each.task.payload for each in taken])
        await carry_all(bench)
        child = await bench.one(subscription)
        assert list(child.inputs) == [f'"{name}"'.encode() for name in names]

    async def test_a_diamond(self, bench: Bench) -> None:
        """Two ways from one task to another: it runs once, after both (U16)."""
        subscription = await bench.subscribed("top")
        await bench.publish("left", "right", after=after("top"))
        await bench.publish("bottom", after=after("left", "right"))
        for expected in (["top"], ["left", "right"], ["bottom"]):
            taken = await bench.take(subscription, 9)
            assert sorted(ids(taken)) == expected
            await subscription.ack(*taken)
            await carry_all(bench)
        await bench.expect(done=4)

    @needs(Capability.CONTROL)
    async def test_a_long_chain_of_cancels(self, bench: Bench) -> None:
        """The end of a task reaches all that follow it, however many (U16)."""
        await bench.publish("t0")
        for number in range(1, 100):
            await bench.publish(f"t{number}", after=after(f"t{number - 1}"))
        await bench.control.cancel(KEY, "t0")
        await carry_all(bench)
        await bench.expect(cancelled=100)

    @needs(Capability.CONTROL, "manual_clock")
    async def test_nothing_is_remembered(self, bench: Bench) -> None:
        """Parents that are forgotten as soon as they have ended release all of their children (U16)."""
        await bench.configure(dedupe_window=0, result_ttl=0)
        subscription, delivery = await bench.running("parent")
        names = [f"c{number}" for number in range(3 * AT_ONCE)]
        await bench.publish(*names, after=after("parent"))
        await carry_all(bench)
        await subscription.ack(delivery)
        await bench.advance(1)
        await bench.control.maintain()
        await bench.advance(1)
        assert await bench.state("parent") is None
        await carry_all(bench)
        assert sorted(ids(await bench.take(subscription, 99))) == sorted(names)

    @needs(Capability.CONTROL)
    async def test_in_another_backend(self, bench: Bench) -> None:
        """Children and parents in different backends find one another by lines, with results (U16)."""
        other = await apart(bench)
        subscription = other.subscribe(OTHER)
        await other.publish("parent", key=OTHER)
        await bench.publish("child", after=after("parent", key=OTHER, inputs=(0,)))
        await bench.expect(blocked=1)
        await carry_all(bench, other)
        await subscription.ack(await other.one(subscription), results=[b"1"])
        await bench.publish("late", after=after("parent", key=OTHER, inputs=(0,)))
        await bench.publish("typo", after=after("none", key=OTHER))
        await bench.expect(blocked=3)
        await carry_all(bench, other)
        taken = await bench.take(bench.subscribe(), 9)
        assert {each.task.id: each.inputs for each in taken} == {"child": (b"1",), "late": (b"1",)}
        assert (await status_of(bench, "typo")).error == UNKNOWN_PARENT

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_dead_letters_of_another_backend(self, bench: Bench) -> None:
        """A dead letter in another backend holds its children until it is redriven (U16)."""
        other = await apart(bench)
        subscription = other.subscribe(OTHER)
        await other.publish("parent", key=OTHER)
        await bench.publish("child", after=after("parent", key=OTHER))
        await carry_all(bench, other)
        await other.bury(subscription, await other.one(subscription))
        await bench.publish("late", after=after("parent", key=OTHER))
        await carry_all(bench, other)
        for child in ("child", "late"):
            assert (await status_of(bench, child)).held_by == (TaskRef(OTHER, "parent"),)
        await other.dead_letters.redrive(OTHER)
        await carry_all(bench, other)
        assert (await status_of(bench, "late")).held_by == ()
        await subscription.ack(await other.one(subscription))
        await carry_all(bench, other)
        assert sorted(ids(await bench.take(bench.subscribe(), 9))) == ["child", "late"]

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_reports_in_a_wrong_order(self, bench: Bench) -> None:
        """A report that is late changes nothing: a dead letter that was redriven does not hold again (U16)."""
        other = await apart(bench)
        subscription = other.subscribe(OTHER)
        await other.publish("parent", key=OTHER)
        await bench.publish("child", after=after("parent", key=OTHER))
        await carry_all(bench, other)
        mine, theirs = joint(bench), joint(other)
        await other.bury(subscription, await other.one(subscription))
        (dead,) = await theirs.lines(9)
        await theirs.confirm(dead)
        await other.dead_letters.redrive(OTHER)
        (alive,) = await theirs.lines(9)
        await mine.release(report_in(alive), report_in(dead))
        assert (await status_of(bench, "child")).held_by == ()
        await mine.release(report_in(alive), report_in(alive))
        await theirs.confirm(alive, alive, dead)
        await bench.expect(blocked=1)
        await subscription.ack(await other.one(subscription))
        (done,) = await theirs.lines(9)
        await mine.release(report_in(done), report_in(dead), report_in(done))
        await bench.expect(waiting=1)

    @needs(Capability.CONTROL, "manual_clock")
    async def test_repeated_registrations(self, bench: Bench) -> None:
        """A registration that is repeated after its parent has ended and is forgotten does not cancel (U16)."""
        other = await apart(bench)
        await other.configure(OTHER, dedupe_window=0, result_ttl=0)
        subscription = other.subscribe(OTHER)
        await other.publish("parent", key=OTHER)
        await bench.publish("child", after=after("parent", key=OTHER, inputs=(0,)))
        mine, theirs = joint(bench), joint(other)
        (registration,) = await mine.lines(9)
        assert registration.kind is LineKind.REGISTER
        for _ in range(2):
            answer = await registered(theirs, registration)
            assert answer.state is not None
            assert answer.state.live
        await subscription.ack(await other.one(subscription), results=[b"1"])
        await bench.advance(1)
        await other.control.maintain()
        await bench.advance(1)
        again = await registered(theirs, registration)
        assert again.state is State.DONE, (
            "the parent is unknown, although its line was not confirmed"
        )
        (end,) = await theirs.lines(9)
        await mine.release(again, report_in(end))
        await mine.confirm(registration)
        await theirs.confirm(end)
        await bench.expect(waiting=1)
        unknown = await registered(theirs, registration)
        assert unknown.state is None
        await mine.release(unknown)
        await bench.expect(waiting=1)

    @needs(Capability.CONTROL, "manual_clock")
    async def test_an_id_that_is_used_again(self, bench: Bench) -> None:
        """A report to an earlier task with the same id, of an earlier parent, changes nothing (U16)."""
        other = await apart(bench)
        await bench.configure(dedupe_window=0)
        await other.configure(OTHER, dedupe_window=0, result_ttl=0)
        subscription, stale = other.subscribe(OTHER), list[Line]()
        for _ in range(2):
            await other.publish("parent", key=OTHER)
            await bench.publish("child", after=after("parent", key=OTHER))
            await carry_all(bench, other)
            await joint(bench).release(*map(report_in, stale))
            await bench.expect(cancelled=len(stale), blocked=1)
            if not stale:
                await subscription.ack(await other.one(subscription))
                stale += await joint(other).lines(9)
                await joint(other).confirm(*stale)
                await bench.control.cancel(KEY, "child")
            for each in (bench, other):
                await each.advance(1)
                await each.control.maintain()
        assert len(stale) == 1
        await subscription.ack(await other.one(subscription))
        await carry_all(bench, other)
        await bench.expect(cancelled=1, waiting=1)

    @needs(Capability.CONTROL)
    async def test_a_parent_that_runs_again(self, bench: Bench) -> None:
        """A child of the second task with an id does not learn of the end of the first (U16)."""
        subscription, delivery = await bench.running("parent")
        names = [f"c{number:02}" for number in range(2 * AT_ONCE)]
        await bench.publish(*names, after=after("parent"))
        await carry_all(bench)
        await subscription.ack(delivery)
        await bench.retry(delivery.task)
        await bench.publish("late", after=after("parent"))
        await carry_all(bench)
        assert await bench.state("late") is State.BLOCKED
        taken = await bench.take(subscription, 3 * AT_ONCE)
        assert sorted(ids(taken)) == sorted([*names, "parent"])
        await subscription.ack(*taken)
        await carry_all(bench)
        assert ids(await bench.take(subscription, 9)) == ["late"]

    async def test_lines_are_read_by_pages(self, bench: Bench) -> None:
        """Lines are read page by page, each once, and stay until they are confirmed (U16)."""
        names = [f"c{number}" for number in range(30)]
        parents = After(tasks=(TaskRef(OTHER, "a"), TaskRef(OTHER, "b")))
        await bench.publish(*names, after=parents)
        lines, last = list[Line](), None
        while page := await joint(bench).lines(7, last):
            lines += page
            last = page[-1].id
        found = {(line.child, line.parent) for line in lines}
        assert len(found) == len(lines) == 60
        assert not await joint(bench).lines(7, lines[-1].id)
        await joint(bench).confirm(*lines[:59])
        assert await joint(bench).lines(100) == tuple(lines[59:])

    @needs(Capability.DEAD_LETTERS)
    async def test_inputs_of_another_backend_are_too_large(self, bench: Bench) -> None:
        """Results from other backends obey the limit of a payload together, too (U16)."""
        other = await apart(bench)
        subscription = other.subscribe(OTHER)
        await other.publish("a", "b", key=OTHER)
        await bench.publish("child", after=after("a", "b", key=OTHER, inputs=(0, 1)))
        large = b'"%s"' % (b"x" * (LIMITS.result - 2))
        await subscription.ack(*await other.take(subscription, 2), results=[large, large])
        await carry_all(bench, other)
        letter = await bench.dead_letters.get(KEY, "child")
        assert letter is not None
        assert letter.reason == INPUTS_TOO_LARGE

    async def test_entries_of_other_backends(self, bench: Bench) -> None:
        """An entry of a child in another backend is any text, and is reported as it was registered (U16)."""
        other = await apart(bench)
        subscription = other.subscribe(OTHER)
        await other.publish("parent", key=OTHER)
        line = Line(
            id="1",
            kind=LineKind.REGISTER,
            parent=TaskRef(OTHER, "parent"),
            child=TaskRef(KEY, "child"),
            entry="7.z-X",
            wants_result=True,
        )
        await registered(joint(other), line)
        await subscription.ack(await other.one(subscription), results=[b"1"])
        (end,) = await joint(other).lines(9)
        assert (end.parent, end.child, end.entry) == (line.parent, line.child, line.entry)
        assert (end.state, end.result) == (State.DONE, b"1")

    async def test_new_lines_end_a_wait(self, bench: Bench) -> None:
        """A carrier that waits learns of a line that its own process wrote (U16)."""
        while lines := await joint(bench).lines(9):
            await joint(bench).confirm(*lines)
        waiting = await bench.start(joint(bench).changed(60))
        await bench.publish("child", after=after("parent", key=OTHER))
        await bench.outcome(waiting)
