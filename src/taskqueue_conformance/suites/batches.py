"""Batches: members without a limit, counted exactly, and an end when the last of them has ended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.partitions import after, carry_all, joint, status_of
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.blocked_lines import apart
from taskqueue_core.after import PARENT_ENDED, TaskRef
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Count
from taskqueue_core.tasks import Published, Refusal, State

BATCH = TaskRef(KEY, "batch")


async def begun(bench: Bench, *members: str, **fields: Any) -> None:
    """Publish a batch with members, and its callbacks."""
    await bench.publish("batch", batch=BATCH)
    await bench.publish("then", after=after("batch"), priority=9)
    await bench.publish("failed", after=after("batch", when="failed"), priority=9)
    await bench.publish(*members, batch=BATCH, **fields)


def _totals(counts: Iterable[Count]) -> tuple[int, int]:
    """Return how many members the partitions have, and how many of them are done."""
    some = tuple(counts)
    return sum(count.added for count in some), sum(count.done for count in some)


class BatchesSuite(Harness, needs=(Capability.AFTER,)):
    """Tests of `Task.batch`."""

    async def test_all_are_done(self, bench: Bench) -> None:
        """A batch is done when it was closed and its last member is done; then its callback runs once (U16)."""
        await begun(bench, "a", "b")
        subscription = bench.subscribe()
        await subscription.ack(await bench.one(subscription))
        assert await joint(bench).close(BATCH)
        await carry_all(bench)
        await bench.expect(done=1, waiting=1, blocked=3)
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        await bench.expect(done=3, waiting=1, cancelled=1)
        assert ids(await bench.take(subscription, 9)) == ["then"]

    @needs(Capability.CONTROL)
    async def test_members_that_ended_before_the_close(self, bench: Bench) -> None:
        """A batch does not end before it is closed, also if its members so far have ended (U16)."""
        await begun(bench, "a")
        subscription = bench.subscribe()
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        await bench.expect(done=1, blocked=3)
        await joint(bench).close(BATCH)
        await carry_all(bench)
        assert (await status_of(bench, "batch")).state is State.DONE

    @needs(Capability.CONTROL)
    async def test_a_member_fails(self, bench: Bench) -> None:
        """A batch with a member that ended otherwise than done is cancelled at its end (U16)."""
        await begun(bench, "a", "b")
        await joint(bench).close(BATCH)
        await bench.control.cancel(KEY, "a")
        await carry_all(bench)
        await bench.expect(cancelled=1, waiting=1, blocked=3)
        subscription = bench.subscribe()
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        status = await status_of(bench, "batch")
        assert (status.state, status.error) == (State.CANCELLED, PARENT_ENDED)
        assert ids(await bench.take(subscription, 9)) == ["failed"]

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_a_dead_member_holds(self, bench: Bench) -> None:
        """A member that is a dead letter holds its batch until it is redriven or discarded (U16)."""
        await begun(bench, "a")
        await joint(bench).close(BATCH)
        subscription = bench.subscribe()
        await bench.bury(subscription, await bench.one(subscription))
        await carry_all(bench)
        await bench.expect(dead=1, blocked=3)
        await bench.dead_letters.redrive(KEY)
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        assert (await status_of(bench, "batch")).state is State.DONE

    @needs(Capability.CONTROL)
    async def test_members_that_come_late(self, bench: Bench) -> None:
        """A member of a closed batch is refused; a repeated publish of an earlier one is a duplicate (law 7; U16)."""
        await begun(bench, "a")
        await joint(bench).close(BATCH)
        await carry_all(bench)
        late = bench.task("late", batch=BATCH)
        again, refused = await bench.offer(bench.task("a", batch=BATCH), late)
        assert again.status is Published.DUPLICATE
        assert (refused.status, refused.code) == (Published.REFUSED, Refusal.BATCH_CLOSED)
        assert await bench.state("late") is None
        subscription = bench.subscribe()
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        assert (await bench.offer(late))[0].code is Refusal.BATCH_CLOSED

    @needs(Capability.CONTROL)
    async def test_an_empty_batch(self, bench: Bench) -> None:
        """A batch without members is done when it is closed; one that does not exist cannot be closed (U16)."""
        assert not await joint(bench).close(BATCH)
        await begun(bench)
        assert await joint(bench).close(BATCH)
        await carry_all(bench)
        assert (await status_of(bench, "batch")).state is State.DONE
        assert not await joint(bench).close(BATCH)

    @needs(Capability.CONTROL)
    async def test_members_in_another_backend(self, bench: Bench) -> None:
        """Members of any backend are counted (U16)."""
        other = await apart(bench)
        await begun(bench, "a")
        await other.publish("b", "c", key=OTHER, batch=BATCH)
        await joint(bench).close(BATCH)
        await carry_all(bench, other)
        subscription, others = bench.subscribe(), other.subscribe(OTHER)
        await subscription.ack(await bench.one(subscription))
        await others.ack(await other.one(others))
        await carry_all(bench, other)
        assert (await status_of(bench, "batch")).state is State.BLOCKED
        (refused,) = await other.offer(other.task("late", key=OTHER, batch=BATCH))
        assert refused.code is Refusal.BATCH_CLOSED
        await others.ack(await other.one(others))
        await carry_all(bench, other)
        assert (await status_of(bench, "batch")).state is State.DONE

    @needs(Capability.CONTROL)
    async def test_counts_that_are_repeated_and_late(self, bench: Bench) -> None:
        """Counts that come twice, late or in a wrong order end a batch neither early nor twice (U16)."""
        other = await apart(bench)
        await begun(bench, "a")
        await other.publish("b", key=OTHER, batch=BATCH)
        mine, theirs = joint(bench), joint(other)
        early = await theirs.seal(BATCH)
        assert _totals(early) == (1, 0)
        assert all(count.closed for count in early)
        subscription, others = bench.subscribe(), other.subscribe(OTHER)
        await others.ack(await other.one(others))
        lines = await theirs.lines(9)
        late = [line.count for line in lines if line.count is not None]
        assert _totals(late) == (1, 1)
        await mine.tally(*late)
        await mine.tally(*late, *early)
        assert (await status_of(bench, "batch")).state is State.BLOCKED
        own = await mine.seal(BATCH)
        await mine.tally(*own, *early, sealed=True)
        assert (await status_of(bench, "batch")).state is State.BLOCKED
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        await mine.tally(*late, *own, *early, sealed=True)
        await theirs.confirm(*lines, *lines)
        assert await theirs.lines(9) == ()
        await bench.expect(done=2, cancelled=1, waiting=1)

    @needs(Capability.CONTROL)
    async def test_a_batch_that_is_cancelled(self, bench: Bench) -> None:
        """The end of a batch closes it; its members run on. Its name can be used again, but not for members (U16)."""
        await bench.configure(dedupe_window=0)
        await begun(bench, "a")
        await bench.control.cancel(KEY, "batch")
        await carry_all(bench)
        (refused,) = await bench.offer(bench.task("late", batch=BATCH))
        assert refused.code is Refusal.BATCH_CLOSED
        subscription = bench.subscribe()
        assert sorted(ids(await bench.take(subscription, 9))) == ["a", "failed"]
        await bench.publish("batch", batch=BATCH)
        assert (await status_of(bench, "batch")).state is State.BLOCKED
        assert (await bench.offer(bench.task("late", batch=BATCH)))[0].code is Refusal.BATCH_CLOSED

    @needs("atomic_retry")
    async def test_a_retried_member(self, bench: Bench) -> None:
        """A retry of a member is the same member; one that is retried after its end is counted again (U16)."""
        await begun(bench, "a")
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        await bench.retry(delivery.task, settles=delivery)
        assert _totals(await joint(bench).seal(BATCH)) == (1, 0)
        delivery = await bench.one(subscription)
        await subscription.ack(delivery)
        await bench.retry(delivery.task, token="again")  # noqa: S106 - a token of a retry
        assert _totals(await joint(bench).seal(BATCH)) == (2, 1)
