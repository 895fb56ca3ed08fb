"""Tasks that wait for others: they are released once, when their parents have ended as they ask, and never before."""

from __future__ import annotations

from typing import Any

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.partitions import after, carry_all, is_cancelled, status_of
from taskqueue_conformance.selection import needs
from taskqueue_core.after import INPUTS_TOO_LARGE, UNKNOWN_PARENT, TaskRef
from taskqueue_core.backend import Capability, Subscription
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Published, Refusal, State
from taskqueue_core.uniqueness import UniqueKey


async def _family(bench: Bench, **fields: Any) -> tuple[Subscription, Delivery]:
    """Return the delivery of a task that others wait for in each way."""
    subscription, delivery = await bench.running("parent", **fields)
    await bench.publish("child", after=after("parent"))
    await bench.publish("grandchild", after=after("child"))
    await bench.publish("finally", after=after("parent", when="ended"))
    await bench.publish("on-failure", after=after("parent", when="failed"))
    return subscription, delivery


async def _parent_failed(bench: Bench, subscription: Subscription) -> None:
    """Fail unless the tasks of `_family` are what an end that is not done makes of them."""
    await is_cancelled(bench, "child")
    await is_cancelled(bench, "grandchild")
    assert sorted(ids(await bench.take(subscription, 9))) == ["finally", "on-failure"]


class BlockedSuite(Harness, needs=(Capability.AFTER,)):
    """Tests of `Task.after` within one queue."""

    @needs(Capability.CONTROL)
    async def test_until_its_parent_is_done(self, bench: Bench) -> None:
        """A task that waits for another one is not delivered before that is done, and then once (laws 1, 8; U16)."""
        subscription = await bench.subscribed("parent")
        await bench.publish("child", after=after("parent"))
        assert (await status_of(bench, "child")).state is State.BLOCKED
        await bench.expect(waiting=1, blocked=1)
        delivery = await bench.one(subscription)
        assert ids(await bench.take(subscription, 2)) == [], "a blocked task was delivered (law 8)"
        await subscription.ack(delivery)
        await carry_all(bench)
        assert ids(await bench.take(subscription, 2)) == ["child"]
        await bench.expect(done=1, in_flight=1)

    async def test_it_waits_for_all(self, bench: Bench) -> None:
        """With several parents, the last one releases the task; a retry or a release of one does not (U16)."""
        subscription, *running = await bench.all_running("a", "b", "c")
        await bench.publish("child", after=after("a", "b", "c"))
        await subscription.ack(running[2])
        await subscription.redeliver(running[0])
        await carry_all(bench)
        await bench.expect(done=1, in_flight=1, waiting=1, blocked=1)
        await subscription.ack(running[1], *await bench.take(subscription, 2))
        await carry_all(bench)
        assert ids(await bench.take(subscription)) == ["child"]

    async def test_a_parent_that_was_done_before(self, bench: Bench) -> None:
        """A task whose parents are done when it is published does not wait (U16)."""
        subscription, delivery = await bench.running("parent")
        await subscription.ack(delivery, results=[b"7"])
        await bench.publish("child", after=after("parent", inputs=(0,)))
        await carry_all(bench)
        child = await bench.one(subscription)
        assert (child.task.id, child.inputs) == ("child", (b"7",))

    @needs(Capability.CONTROL)
    async def test_unknown_parents(self, bench: Bench) -> None:
        """A task that waits for one that the store does not know is cancelled, with its reason (U16)."""
        await bench.publish("parent")
        await bench.publish("child", after=after("parent", "typo"))
        await bench.publish("grandchild", after=after("child", when="ended"))
        await is_cancelled(bench, "child", UNKNOWN_PARENT)
        await bench.expect(cancelled=1, waiting=2)

    @needs(Capability.CONTROL)
    async def test_a_parent_is_cancelled(self, bench: Bench) -> None:
        """A parent that is cancelled cancels what waits for it to be done, and so on (U16)."""
        subscription, _ = await _family(bench)
        await bench.control.cancel(KEY, "parent")
        await _parent_failed(bench, subscription)

    @needs(Capability.CONTROL)
    async def test_a_parent_expires(self, bench: Bench) -> None:
        """A parent that expires cancels what waits for it to be done, and so on (U16)."""
        subscription, _ = await _family(bench, deadline=bench.now + bench.short)
        await bench.advance(bench.short)
        await bench.control.maintain()
        await _parent_failed(bench, subscription)

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_a_parent_is_discarded(self, bench: Bench) -> None:
        """A dead letter that is discarded cancels what waits for it to be done, and so on (U16)."""
        subscription, delivery = await _family(bench)
        await bench.bury(subscription, delivery)
        await bench.dead_letters.discard(KEY)
        await _parent_failed(bench, subscription)

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_a_dead_letter_holds(self, bench: Bench) -> None:
        """A dead letter holds what waits for it, whose status names it, until it is redriven and done (U16)."""
        subscription, delivery = await bench.running("parent")
        await bench.publish("child", after=after("parent"))
        await bench.bury(subscription, delivery)
        await bench.publish("later", after=after("parent"))
        await carry_all(bench)
        for child in ("child", "later"):
            status = await status_of(bench, child)
            assert (status.state, status.held_by) == (State.BLOCKED, (TaskRef(KEY, "parent"),))
        await bench.dead_letters.redrive(KEY)
        await carry_all(bench)
        assert (await status_of(bench, "child")).held_by == ()
        await bench.expect(waiting=1, blocked=2)
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        assert sorted(ids(await bench.take(subscription, 3))) == ["child", "later"]

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_what_a_dead_letter_decides(self, bench: Bench) -> None:
        """A dead letter cancels if that is asked for, and counts as ended and as failed (U16)."""
        subscription, delivery = await bench.running("parent")
        await bench.publish("cancel", after=after("parent", on_dead="cancel"))
        await bench.publish("ended", after=after("parent", when="ended"))
        await bench.publish("failed", after=after("parent", when="failed"))
        await bench.bury(subscription, delivery)
        await is_cancelled(bench, "cancel")
        assert sorted(ids(await bench.take(subscription, 9))) == ["ended", "failed"]
        await bench.dead_letters.redrive(KEY)
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        await bench.expect(cancelled=1, in_flight=2, done=1)

    @needs(Capability.CONTROL, Capability.DEAD_LETTERS)
    async def test_a_dead_letter_that_is_retried(self, bench: Bench) -> None:
        """The retry of a dead letter lets go on what it holds, as a redrive does (U16)."""
        subscription, delivery = await bench.running("parent")
        await bench.publish("child", after=after("parent"))
        await bench.bury(subscription, delivery)
        await bench.retry(delivery.task)
        await carry_all(bench)
        assert (await status_of(bench, "child")).held_by == ()
        await subscription.ack(await bench.one(subscription))
        await carry_all(bench)
        assert ids(await bench.take(subscription)) == ["child"]

    @needs(Capability.CONTROL)
    async def test_when_failed(self, bench: Bench) -> None:
        """An error callback runs at the first failure, and is cancelled if all parents are done (U16)."""
        subscription, one, two = await bench.all_running("a", "b")
        await bench.publish("none", after=after("a", when="failed"))
        await bench.publish("some", after=after("a", "b", when="failed"))
        await subscription.ack(one)
        await is_cancelled(bench, "none")
        await bench.expect(done=1, in_flight=1, cancelled=1, blocked=1)
        await bench.control.cancel(KEY, two.task.id)
        await carry_all(bench)
        assert ids(await bench.take(subscription)) == ["some"]

    @needs("atomic_retry")
    async def test_results_are_inputs(self, bench: Bench) -> None:
        """The results of parents come with the task, in the order that it asks for, at every delivery (U16).

        So they do with an encoded task, which has a digest of its content.
        """
        subscription, *running = await bench.all_running("a", "b", "c")
        await bench.publish(
            "child",
            after=after("a", "b", "c", inputs=(2, 1, 0)),
            content_digest=bytes(range(240, 256)),
        )
        results = [b'"a"', None, b'{"c": 1}']
        await subscription.ack(*running, results=results)
        await carry_all(bench)
        child = await bench.one(subscription)
        assert child.inputs == tuple(reversed(results))
        await subscription.redeliver(child)
        again = await bench.one(subscription)
        assert again.inputs == child.inputs
        await bench.retry(child.task, settles=again)
        assert (await bench.one(subscription)).inputs == child.inputs

    @needs(Capability.DEAD_LETTERS)
    async def test_inputs_that_are_too_large(self, bench: Bench) -> None:
        """Results that are larger together than a payload may be make a dead letter, with its reason (U16)."""
        subscription, *running = await bench.all_running("a", "b", "c")
        await bench.publish("child", after=after("a", "b", "c", inputs=(0, 1)))
        await bench.publish("finally", after=after("child", when="ended"))
        large = b'"%s"' % (b"x" * (LIMITS.payload // 2))
        await subscription.ack(*running[:2], results=[large, large])
        await carry_all(bench)
        letter = await bench.dead_letters.get(KEY, "child")
        assert letter is not None
        assert letter.reason == INPUTS_TOO_LARGE
        assert ids(await bench.take(subscription, 3)) == ["finally"]
        await bench.dead_letters.redrive(KEY)
        assert (await bench.one(subscription)).inputs == ()

    @needs(Capability.CONTROL)
    async def test_its_time(self, bench: Bench) -> None:
        """A released task does not run before its time, also if it was rescheduled while it was blocked (law 8)."""
        subscription, *running = await bench.all_running("parent")
        at = bench.now + bench.short
        await bench.publish("early", after=after("parent"))
        await bench.publish("late", after=after("parent"), not_before=at)
        await bench.publish("moved", after=after("parent"))
        assert await bench.control.reschedule(KEY, "moved", at)
        await bench.expect(in_flight=1, blocked=3)
        await subscription.ack(*running)
        await carry_all(bench)
        assert ids(await bench.take(subscription, 9)) == ["early"]
        assert (await status_of(bench, "late")).state is State.SCHEDULED
        await bench.advance(bench.short)
        assert sorted(ids(await bench.take(subscription, 9))) == ["late", "moved"]

    async def test_a_retry_waits_too(self, bench: Bench) -> None:
        """A retry of a blocked task does not release it (laws 3, 8)."""
        (parent,) = await bench.publish("parent")
        (child,) = await bench.publish("child", after=after("parent"))
        assert await bench.retry(child) is Published.ACCEPTED
        await bench.expect(waiting=1, blocked=1)
        subscription = bench.subscribe()
        (delivery,) = await bench.take(subscription, 9)
        assert delivery.task == parent
        await subscription.ack(delivery)
        await carry_all(bench)
        await bench.advance(0.01)
        delivery = await bench.one(subscription)
        assert (delivery.task.id, delivery.attempt) == ("child", 2)

    @needs(Capability.CONTROL)
    async def test_published_again(self, bench: Bench) -> None:
        """A blocked task is a duplicate or a conflict by its payload, as every other one (law 7)."""
        await bench.publish("parent")
        await bench.publish("child", after=after("parent"))
        assert (await status_of(bench, "child")).state is State.BLOCKED
        child = bench.task("child", after=after("parent"))
        assert await bench.statuses(child, bench.task("child", payload="other")) == [
            Published.DUPLICATE,
            Published.CONFLICT,
        ]
        await bench.expect(waiting=1, blocked=1)

    @needs(Capability.CONTROL, Capability.FLOW)
    async def test_capacity(self, bench: Bench) -> None:
        """A blocked task takes room from its publish; its release needs none, and is not refused (law 6)."""
        await bench.limit(capacity=2)
        subscription, delivery = await bench.running("parent")
        await bench.publish("child", after=after("parent"))
        await bench.publish("other")
        (refused,) = await bench.offer(bench.task("more", after=after("parent")))
        assert refused.code is Refusal.QUEUE_FULL
        await bench.limit(capacity=1)
        await subscription.ack(delivery)
        await carry_all(bench)
        await bench.expect(done=1, waiting=2)

    @needs(Capability.CONTROL, Capability.FLOW)
    async def test_a_child_that_ends_frees_room(self, bench: Bench) -> None:
        """A blocked task that is cancelled takes no more room (law 6)."""
        await bench.limit(capacity=2)
        await bench.publish("parent")
        await bench.publish("child", after=after("parent"))
        await bench.control.cancel(KEY, "child")
        await bench.publish("other")
        await bench.expect(cancelled=1, waiting=2)

    @needs(Capability.CONTROL)
    async def test_ends_while_blocked(self, bench: Bench) -> None:
        """A blocked task can be cancelled and expire; its parent's end changes nothing then (laws 1, 8)."""
        subscription, delivery = await bench.running("parent")
        await bench.publish("cancelled", after=after("parent"))
        await bench.publish("expired", after=after("parent"), deadline=bench.now + bench.short)
        assert await bench.control.cancel(KEY, "cancelled")
        await bench.advance(bench.short)
        await bench.control.maintain()
        await subscription.ack(delivery)
        await carry_all(bench)
        await bench.expect(done=1, cancelled=1, expired=1)
        assert await bench.take(subscription, 9) == []

    @needs(Capability.CONTROL)
    async def test_purged_while_blocked(self, bench: Bench) -> None:
        """A purge ends blocked tasks too, and counts each of them (law 1)."""
        await bench.publish("parent", key=OTHER)
        await bench.publish("child", after=after("parent", key=OTHER))
        await bench.publish("grandchild", after=after("child"))
        assert await bench.control.purge(KEY) == 2
        await bench.expect(cancelled=2)
        assert await bench.control.purge(OTHER) == 1
        circle = [bench.task(f"t{n}", after=after(f"t{(n + 1) % 3}")) for n in range(3)]
        await bench.offer(*circle)
        await carry_all(bench)
        assert await bench.control.purge(KEY) == 3, "a task that waits for a later one (law 1)"

    async def test_a_release_wakes(self, bench: Bench) -> None:
        """A released task ends the wait of a receive (law 4)."""
        subscription, delivery = await bench.running("parent")
        await bench.publish("child", after=after("parent"))

        async def end() -> None:
            await subscription.ack(delivery)
            await carry_all(bench)

        assert await bench.wakes(bench.subscribe().receive(1, 60), end()) == ["child"]

    async def test_place_of_a_released_task(self, bench: Bench) -> None:
        """A released task comes after those of its priority that were waiting already (law 4)."""
        subscription, delivery = await bench.running("parent")
        await bench.publish("child", after=after("parent"))
        await bench.publish("first", after=after("parent"), priority=9)
        await bench.publish("waiting")
        await subscription.ack(delivery)
        await carry_all(bench)
        await bench.publish("last")
        assert ids(await bench.take(subscription, 9)) == ["first", "waiting", "child", "last"]

    @needs(Capability.ORDERING_KEYS)
    async def test_ordering_keys(self, bench: Bench) -> None:
        """A blocked task does not hold its ordering key; released, it waits for its turn (laws 4, 8)."""
        subscription, delivery = await bench.running("parent")
        await bench.publish("child", after=after("parent"), ordering_key="k")
        await bench.publish("one", "two", ordering_key="k")
        (one,) = await bench.take(subscription, 9)
        assert one.task.id == "one"
        await subscription.ack(delivery)
        await carry_all(bench)
        assert await bench.take(subscription, 9) == []
        await subscription.ack(one)
        assert ids(await bench.take(subscription, 9)) == ["two"]

    @needs(Capability.UNIQUE)
    async def test_unique_keys(self, bench: Bench) -> None:
        """A blocked task holds its unique key; a replacement stays blocked (U12)."""
        subscription, delivery = await bench.running("parent")
        key = UniqueKey(key="u")
        await bench.publish("child", after=after("parent"), unique=key)
        (kept,) = await bench.offer(bench.task("other", unique=key))
        assert (kept.status, kept.existing_id) == (Published.DUPLICATE, "child")
        replacing = UniqueKey(key="u", on_conflict="replace")
        other = bench.task("third", payload=3, unique=replacing, after=after("other"))
        (replaced,) = await bench.offer(other)
        assert (replaced.status, replaced.existing_id) == (Published.REPLACED, "child")
        await bench.expect(in_flight=1, blocked=1)
        await subscription.ack(delivery)
        await carry_all(bench)
        child = await bench.one(subscription)
        assert (child.task.id, child.task.payload) == ("child", b"3")
        assert child.task.after == after("parent"), "it keeps its own parents"

    @needs(Capability.UNIQUE)
    async def test_replacement_of_a_task_without_parents(self, bench: Bench) -> None:
        """A task that waits for nothing waits for nothing after a replacement by one with parents (U12)."""
        replacing = UniqueKey(key="u", on_conflict="replace")
        await bench.publish("first", unique=replacing)
        parents = after("other", "first")  # also for the one that is replaced
        await bench.offer(bench.task("second", payload=2, unique=replacing, after=parents))
        (first,) = await bench.take(bench.subscribe())
        assert (first.task.id, first.task.payload, first.task.after) == ("first", b"2", None)

    @needs(Capability.UNIQUE, Capability.CONTROL)
    async def test_a_parent_that_replaced_another_task(self, bench: Bench) -> None:
        """The id of a publish that replaced another task is no task, so what waits for it is cancelled (U12, U16)."""
        replacing = UniqueKey(key="u", on_conflict="replace")
        await bench.publish("first", unique=replacing)
        await bench.offer(bench.task("second", unique=replacing))
        await bench.publish("child", after=after("second"))
        await is_cancelled(bench, "child", UNKNOWN_PARENT)
