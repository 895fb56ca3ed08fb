"""Publishing: tasks are confirmed in order, stored exactly once, and not changed."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.tasks import Published


class PublishSuite(Harness):
    """Tests of `Publisher.publish`."""

    async def test_confirmations_come_in_order(self, bench: Bench) -> None:
        """Each task of a batch is confirmed with its key and id, in the given order (D1)."""
        tasks = (bench.task("t1"), bench.task("t2", key=OTHER), bench.task("t3"))
        confirmations = await bench.offer(*tasks)
        assert [(c.key, c.task_id) for c in confirmations] == [(t.key, t.id) for t in tasks]
        assert all(c.status is Published.ACCEPTED and c.stored for c in confirmations)

    async def test_publishing_nothing(self, bench: Bench) -> None:
        """Publishing no tasks returns no confirmations."""
        assert await bench.offer() == ()

    async def test_nothing_is_changed_on_the_way(self, bench: Bench) -> None:
        """A delivered task equals the published task in every field and byte."""
        task = bench.task(
            "a-task:id@1",
            payload={"text": "grüße \u2028 \U0001f600", "numbers": [0, -1.5, 1e300, 2**53, None]},
            headers={"traceparent": "00-abc-def-01", "note": "ß and {braces}"},
            priority=7,
            tenant="acme",
            ordering_key="user:1" if has(bench.backend, Capability.ORDERING_KEYS) else None,
            deadline=bench.now + 3600.25,
            not_before=bench.now - 1.125,
            max_attempts=3,
        )
        await bench.offer(task)
        assert (await bench.one(bench.subscribe())).task == task

    async def test_largest_payload_and_batch(self, bench: Bench) -> None:
        """A batch of 1,000 tasks, and a task with the largest allowed payload, are accepted."""
        await bench.publish("large", payload="x" * (256 * 1024 - 2))
        await bench.publish(*(f"t{n}" for n in range(1000)), key=OTHER)
        subscription = bench.subscribe(KEY, OTHER)
        assert len(await bench.take(subscription, 1001)) == 1001

    async def test_resend_is_a_duplicate(self, bench: Bench) -> None:
        """A task with the same key, id and payload is stored once, whatever else differs (law 7)."""
        await bench.publish("t1", priority=5)
        changed = bench.task("t1", priority=9, headers={"resent": "yes"})
        again = await bench.offer(bench.task("t1", priority=5), changed)
        assert [c.status for c in again] == [Published.DUPLICATE] * 2
        assert all(c.stored for c in again), "a duplicate must count as stored"
        taken = await bench.take(bench.subscribe(), 3)
        assert ids(taken) == ["t1"], "a duplicate was delivered (law 7)"
        assert taken[0].task.priority == 5, "a duplicate replaced the stored task (law 7)"
        await bench.expect(in_flight=1)

    async def test_other_payload_is_a_conflict(self, bench: Bench) -> None:
        """The same id with another payload is a conflict, and the stored task does not change (law 7)."""
        await bench.publish("t1", payload="first")
        (answer,) = await bench.offer(bench.task("t1", payload="second"))
        assert answer.status is Published.CONFLICT
        assert not answer.stored
        taken = await bench.take(bench.subscribe(), 2)
        assert [delivery.task.value() for delivery in taken] == ["first"]

    async def test_repeats_within_a_batch(self, bench: Bench) -> None:
        """Duplicates and conflicts within one batch do not affect its other tasks (law 7)."""
        new, known, conflict = Published.ACCEPTED, Published.DUPLICATE, Published.CONFLICT
        statuses = await bench.statuses("t1", "t1", bench.task("t1", payload="other"), "t2")
        assert statuses == [new, known, conflict, new]
        assert ids(await bench.take(bench.subscribe(), 4)) == ["t1", "t2"]

    async def test_ids_are_unique_per_key(self, bench: Bench) -> None:
        """The same id in another queue identifies another task."""
        await bench.publish("t1")
        await bench.publish("t1", key=OTHER, payload="other")
        assert len(await bench.take(bench.subscribe(KEY, OTHER), 3)) == 2

    async def test_known_in_every_live_state(self, bench: Bench) -> None:
        """A task published again is a duplicate while it is scheduled, waiting, in flight or released (law 7)."""
        subscription = bench.subscribe()
        await bench.publish("scheduled", not_before=bench.now + 3600)
        await _resent(bench, "scheduled")
        await bench.publish("t1")
        await _resent(bench, "t1")
        delivery = await bench.one(subscription)
        await _resent(bench, "t1")
        await subscription.redeliver(delivery)
        await _resent(bench, "t1")
        assert ids(await bench.take(subscription, 3)) == ["t1"], "stored twice (law 7)"

    async def test_known_after_its_end(self, bench: Bench) -> None:
        """An executed task that is published again is not executed again (law 7; D5)."""
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        await _resent(bench, "t1")
        assert await bench.take(subscription) == [], "an executed task was delivered again (law 7)"
        await bench.expect(done=1)

    @needs(Capability.DEAD_LETTERS, Capability.CONTROL)
    async def test_known_when_cancelled_and_dead(self, bench: Bench) -> None:
        """The ids of cancelled tasks and dead letters are still recognized as duplicates (law 7)."""
        subscription = await bench.subscribed("t1", "t2")
        assert await bench.control.cancel(KEY, "t1")
        await _resent(bench, "t1")
        await bench.bury(subscription, await bench.one(subscription))
        await _resent(bench, "t2")
        assert await bench.take(subscription) == []

    @needs(Capability.CONTROL)
    async def test_window_ends(self, bench: Bench) -> None:
        """An ended task that is published again is a duplicate within ``dedupe_window``, and new after it (law 7)."""
        await bench.configure(dedupe_window=2 * bench.short)
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery)
        await bench.advance(bench.short)
        await _resent(bench, "t1")
        await bench.advance(bench.short * 1.5)
        await bench.publish("t1", payload="another life")
        delivery = await bench.one(subscription)
        assert (delivery.attempt, delivery.task.value()) == (1, "another life")
        await bench.expect(published=2, done=1, in_flight=1)

    async def test_position(self, bench: Bench) -> None:
        """If a confirmation has a position, it is the number of tasks that wait ahead of the confirmed task."""
        for before in range(3):
            (answer,) = await bench.offer(f"t{before}")
            assert answer.position in (None, before), (
                f"position: expected {before}, got {answer.position}"
            )


async def _resent(bench: Bench, task_id: str) -> None:
    statuses = await bench.statuses(task_id, bench.task(task_id, payload="something else"))
    expected = [Published.DUPLICATE, Published.CONFLICT]
    assert statuses == expected, f"{task_id} was forgotten too early (law 7)"
