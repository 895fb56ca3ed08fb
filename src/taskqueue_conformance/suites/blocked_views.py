"""What operators see of blocked tasks: what each one waits for, and how many of them dead letters hold."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.partitions import after, carry_all, status_of
from taskqueue_conformance.selection import needs
from taskqueue_core.after import PARENTS_SHOWN, TaskRef
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import State


async def _held(bench: Bench) -> int:
    """Return how many blocked tasks of the queue dead letters hold, once all lines were carried."""
    await carry_all(bench)
    return (await bench.control.stats(KEY)).blocked_on_dead


class BlockedViewsSuite(Harness, needs=(Capability.AFTER, Capability.CONTROL)):
    """Tests of `TaskStatus.waits_for` and `QueueStats.blocked_on_dead`."""

    async def test_what_a_task_waits_for(self, bench: Bench) -> None:
        """The status of a blocked task names some of its missing parents, sorted, and has the number of all (U16)."""
        number = PARENTS_SHOWN + 2
        names = [f"p{place:02}" for place in range(number)]
        subscription, *running = await bench.all_running(*names)
        await bench.publish("child", after=after(*reversed(names)))
        for ended in (0, 1, 3):
            await subscription.ack(*running[max(0, ended - 2) : ended])
            await carry_all(bench)
            status, left = await status_of(bench, "child"), number - ended
            assert (len(status.waits_for), status.waits_for_total) == (
                min(left, PARENTS_SHOWN),
                left,
            )
            missing = [TaskRef(KEY, name) for name in names[ended:]]
            assert [ref for ref in missing if ref in status.waits_for] == list(status.waits_for)
        await subscription.ack(*running[3:])
        await carry_all(bench)
        status = await status_of(bench, "child")
        assert (status.state, status.waits_for, status.waits_for_total) == (State.WAITING, (), 0)

    async def test_what_is_cancelled_waits_for_nothing(self, bench: Bench) -> None:
        """A task that was cancelled while it was blocked waits for nothing, also after it was published again (U16)."""
        (child,) = await bench.publish("child", after=after("typo", "parent"))
        assert (await status_of(bench, "child")).waits_for_total == 2
        await bench.control.cancel(KEY, "child")
        await bench.retry(child)
        status = await status_of(bench, "child")
        assert (status.waits_for, status.waits_for_total) == ((), 0)

    @needs(Capability.DEAD_LETTERS)
    async def test_blocked_on_dead(self, bench: Bench) -> None:
        """Tasks that dead letters hold are counted, each once, until none holds them or they end (U16)."""
        subscription, a, b = await bench.all_running("a", "b")
        await bench.publish("both", after=after("a", "b"))
        await bench.publish("one", after=after("a"))
        await bench.publish("other", after=after("b"))
        await bench.publish("ended", after=after("a", "b", when="ended"))
        await bench.publish("cancel", after=after("a", on_dead="cancel"))
        assert await _held(bench) == 0
        await bench.bury(subscription, a)
        assert await _held(bench) == 2
        await bench.bury(subscription, b)
        await bench.publish("late", after=after("a"))
        assert await _held(bench) == 4
        await bench.dead_letters.redrive(KEY, "a")
        assert await _held(bench) == 2
        taken = {each.task.id: each for each in await bench.take(subscription, 9)}
        assert taken.keys() == {"a", "ended"}
        await bench.bury(subscription, taken["a"])
        assert await _held(bench) == 4
        assert (await status_of(bench, "both")).waits_for == (TaskRef(KEY, "a"), TaskRef(KEY, "b"))
        await bench.control.cancel(KEY, "late")
        assert await _held(bench) == 3
        await bench.dead_letters.discard(KEY, "b")
        assert await _held(bench) == 1
        await bench.control.purge(KEY)
        assert await _held(bench) == 0
        await bench.expect(dead=1, discarded=1, cancelled=5, in_flight=1)

    @needs(Capability.DEAD_LETTERS, "manual_clock")
    async def test_blocked_on_dead_until_the_deadline(self, bench: Bench) -> None:
        """A held task is counted no longer once it has expired, or its parent was retried (U16)."""
        subscription, delivery = await bench.running("parent")
        await bench.bury(subscription, delivery)
        await bench.publish("late", after=after("parent"), deadline=bench.now + bench.short)
        await bench.publish("child", after=after("parent"))
        assert await _held(bench) == 2
        await bench.advance(bench.short)
        await bench.control.maintain()
        assert await _held(bench) == 1
        await bench.retry(delivery.task)
        assert await _held(bench) == 0
