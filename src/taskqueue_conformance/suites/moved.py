"""The capability ``flow``: a queue with the setting ``moved_to`` accepts no new tasks."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import check_refused
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Published, Refusal, State


class MovedSuite(Harness, needs=(Capability.FLOW, Capability.CONTROL)):
    """Tests of ``moved_to``."""

    async def test_moved_takes_nothing_new(self, bench: Bench) -> None:
        """A moved queue refuses new tasks without suggesting a retry, and stores none of them (laws 6, 9; A20)."""
        await bench.limit(moved_to="elsewhere")
        scheduled = bench.task("t2", not_before=bench.now + 3600)
        *refused, other = await bench.offer("t1", scheduled, bench.task("t3", key=OTHER))
        for answer in refused:
            check_refused(answer, Refusal.MOVED)
        assert other.status is Published.ACCEPTED
        assert await bench.state("t1") is None
        await bench.expect()

    async def test_moved_knows_what_it_had(self, bench: Bench) -> None:
        """A moved queue still recognizes the ids of its live and ended tasks (law 7; A20)."""
        subscription, delivery = await bench.running("done", "waiting")
        await subscription.ack(delivery)
        await bench.limit(moved_to="elsewhere")
        other = bench.task("waiting", payload="other")
        *known, new = await bench.offer("done", "waiting", other, "new")
        expected = [Published.DUPLICATE, Published.DUPLICATE, Published.CONFLICT]
        assert [answer.status for answer in known] == expected, "the move hides known ids (law 7)"
        check_refused(new, Refusal.MOVED)
        await bench.expect(done=1, waiting=1)

    @needs("atomic_retry")
    async def test_moved_goes_on(self, bench: Bench) -> None:
        """Tasks in a moved queue are delivered, released, retried and settled as before (laws 1, 3, 6; A20)."""
        await bench.limit(capacity=2)
        await bench.publish("t1", "t2")
        await bench.limit(moved_to="elsewhere")
        subscription = bench.subscribe()
        first, second = await bench.take(subscription, 2)
        await subscription.redeliver(second)
        for task, settles in ((first.task, first), (bench.task("unknown"), None)):
            answer = await bench.retry(task, settles=settles)
            assert answer is Published.ACCEPTED, "a retry was refused (law 6)"
        taken = await bench.eventually(subscription, 3)
        assert sorted(ids(taken)) == ["t1", "t2", "unknown"]
        await subscription.ack(*taken)
        await bench.expect(done=3)

    @needs(Capability.DEAD_LETTERS)
    async def test_moved_redrives(self, bench: Bench) -> None:
        """The dead letters of a moved queue can be redriven into it (law 6; A20)."""
        subscription, delivery = await bench.running("dead")
        await bench.bury(subscription, delivery)
        await bench.limit(moved_to="elsewhere")
        assert await bench.dead_letters.redrive(KEY) == 1
        assert ids(await bench.take(subscription, 9)) == ["dead"]

    async def test_moved_before_all_else(self, bench: Bench) -> None:
        """A moved queue refuses with ``MOVED`` even if its intake is paused or it is full (law 6; A20)."""
        await bench.limit(capacity=1)
        await bench.publish("t1")
        await bench.limit(moved_to="elsewhere", intake_paused=True)
        (answer,) = await bench.offer("t2")
        check_refused(answer, Refusal.MOVED)

    async def test_moved_back(self, bench: Bench) -> None:
        """After ``moved_to`` is removed, the queue accepts tasks at once (law 9; A20)."""
        await bench.limit(moved_to="elsewhere")
        await bench.limit(moved_to=None)
        await bench.publish("t1")
        assert await bench.state("t1") is State.WAITING

    @needs("shared")
    async def test_moved_for_every_replica(self, bench: Bench) -> None:
        """Once one replica confirms ``moved_to``, every replica refuses new tasks (laws 6, 9; A20, F7)."""
        other = await bench.replica()
        await other.publish("before")
        await bench.limit(moved_to="elsewhere")
        (answer,) = await other.offer("after")
        check_refused(answer, Refusal.MOVED)
