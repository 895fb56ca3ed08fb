"""The capability ``flow``: which tasks a full queue refuses, and which tasks it never refuses."""

from __future__ import annotations

import asyncio

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import check_refused
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Delivery, Published, Refusal, Task


class CapacitySuite(Harness, needs=(Capability.FLOW, Capability.CONTROL)):
    """Tests of ``capacity`` and ``intake_paused``."""

    async def test_surplus_is_refused(self, bench: Bench) -> None:
        """A publish beyond the capacity is refused, with a reason, and stores nothing (law 6; B5, B13, OPEN-A2)."""
        await bench.limit(capacity=3)
        answers = await bench.offer("t1", "t2", "t3", "t4", "t5")
        statuses = [answer.status for answer in answers]
        assert statuses == [Published.ACCEPTED] * 3 + [Published.REFUSED] * 2
        for answer in answers[3:]:
            check_refused(answer, Refusal.QUEUE_FULL, depth=3)
        await bench.expect(waiting=3)
        assert await bench.state("t4") is None
        assert ids(await bench.take(bench.subscribe(), 9)) == ["t1", "t2", "t3"]
        await bench.publish("t4", "t5", "t6")

    async def test_refused_though_it_may_come_again(self, bench: Bench) -> None:
        """If a task whose id was used before is refused, the result of the earlier task is kept (law 6)."""
        await bench.limit(capacity=1, dedupe_window=bench.short / 2, result_ttl=3600)
        subscription, delivery = await bench.running("t1")
        await subscription.ack(delivery, results=[b"1"])
        await bench.advance(bench.short)
        await bench.publish("t2")
        (answer,) = await bench.offer("t1")
        check_refused(answer, Refusal.QUEUE_FULL, depth=1)
        assert await bench.control.results(KEY, "t1") == (b"1",), (
            "a refusal deleted a result (law 6)"
        )

    async def test_queues_do_not_share_it(self, bench: Bench) -> None:
        """In a batch for two queues, one of which is full, only the tasks of the full queue are refused (law 6; B5)."""
        await bench.limit(capacity=1)
        positions = [KEY, OTHER, KEY, OTHER]
        tasks = [bench.task(f"t{n}", key=key) for n, key in enumerate(positions)]
        answers = await bench.offer(*tasks)
        assert [(a.key, a.task_id) for a in answers] == [(task.key, task.id) for task in tasks]
        refused = [answer.status is Published.REFUSED for answer in answers]
        assert refused == [False, False, True, False]

    async def test_known_ids_have_their_answer(self, bench: Bench) -> None:
        """A task with a known id is a duplicate or conflict, even if the queue refuses new tasks (laws 6, 7; B13)."""
        await bench.limit(capacity=2)
        await bench.publish("t1", "t2")
        for limits in ({}, {"intake_paused": True}, {"capacity": None}):
            await bench.limit(**limits)
            tasks = ("t1", "new", bench.task("t2", payload="other"))
            expected = [Published.DUPLICATE, Published.REFUSED, Published.CONFLICT]
            assert await bench.statuses(*tasks) == expected, "a limit hides known ids (laws 6, 7)"
        await bench.expect(waiting=2)

    async def test_first_delivery_makes_room(self, bench: Bench) -> None:
        """A task counts against the capacity until its first delivery, not while it runs (law 6)."""
        await bench.limit(capacity=2)
        subscription, delivery = await bench.running("t1", "t2")
        await _has_room(bench, 1, of=2)
        await subscription.ack(delivery)
        await _has_room(bench, 0, of=2)

    async def test_cancelled_make_room(self, bench: Bench) -> None:
        """Cancelling a waiting or scheduled task frees capacity; a running task uses no capacity (law 6)."""
        await bench.limit(capacity=3)
        await bench.publish("running", "waiting")
        await bench.publish("scheduled", not_before=bench.now + 3600)
        await bench.one(bench.subscribe())
        for task_id, room in (("waiting", 2), ("scheduled", 1), ("running", 0)):
            assert await bench.control.cancel(KEY, task_id)
            await _has_room(bench, room, of=3)

    async def test_purged_make_room(self, bench: Bench) -> None:
        """After a purge, a queue accepts exactly as many tasks as its capacity (law 6)."""
        await bench.limit(capacity=3)
        subscription, delivery = await bench.running("returned", "waiting")
        await subscription.redeliver(delivery)
        await bench.publish("scheduled", not_before=bench.now + 3600)
        assert await bench.control.purge(KEY) == 3
        await _has_room(bench, 3, of=3)

    async def test_expired_make_room(self, bench: Bench) -> None:
        """A task that expires before its first delivery frees capacity (laws 6, 8)."""
        await bench.limit(capacity=2)
        subscription = bench.subscribe()
        for find in (lambda: subscription.receive(1, 0), bench.control.maintain):
            await bench.publish(*_names(bench, 2), deadline=bench.now + bench.short)
            await bench.advance(bench.short)
            for _ in range(3):
                await find()
            await bench.control.purge(KEY)
        await _has_room(bench, 2, of=2)
        assert (await bench.control.ledger(KEY)).expired == 4

    async def test_scheduled_take_room(self, bench: Bench) -> None:
        """A scheduled task counts against the capacity from its publishing to its first delivery (laws 6, 8)."""
        await bench.limit(capacity=2)
        await bench.publish("scheduled", not_before=bench.now + bench.short)
        await _has_room(bench, 1, of=2)
        await bench.advance(bench.short)
        subscription = bench.subscribe()
        await _has_room(bench, 0, of=2)
        await bench.take(subscription, 2)
        await _has_room(bench, 2, of=2)

    async def test_releases_take_no_room(self, bench: Bench) -> None:
        """Released and lost tasks, including those of a closed consumer, return even to a full queue (laws 3, 6)."""
        await bench.limit(capacity=3)
        subscription, first, second, _ = await bench.all_running("t1", "t2", "t3")
        await _has_room(bench, 3, of=3)
        await subscription.redeliver(first)
        await subscription.redeliver(second, lost=True)
        await subscription.close()
        await bench.expect(waiting=6)
        taken = await bench.take(bench.subscribe(), 3)
        assert ids(taken) == ["t1", "t2", "t3"]
        assert [delivery.attempt for delivery in taken] == [1, 1, 1]
        await _has_room(bench, 0, of=3)

    async def test_retries_take_no_room(self, bench: Bench) -> None:
        """A retry is never refused, whatever the state of the task, and needs no capacity (law 6)."""
        await bench.limit(capacity=2)
        subscription, done, running = await bench.all_running("done", "running")
        await subscription.ack(done)
        await _has_room(bench, 2, of=2)
        await bench.limit(intake_paused=True)
        retries: list[tuple[Task, Delivery | None]]
        retries = [(done.task, None), (bench.task("unknown"), None)]
        if bench.backend.capabilities.atomic_retry:
            retries.append((running.task, running))
        for task, settles in retries:
            answer = await bench.retry(task, settles=settles)
            assert answer is Published.ACCEPTED, "a retry was refused (law 6)"
        await bench.limit(intake_paused=False)
        assert await bench.control.cancel(KEY, "unknown")
        await _has_room(bench, 0, of=2)
        taken = await bench.take(bench.subscribe(), 9)
        assert "done" in ids(taken)
        await _has_room(bench, 2, of=2)

    async def test_retried_before_its_delivery(self, bench: Bench) -> None:
        """A task that is retried before its first delivery no longer counts against the capacity (law 6)."""
        await bench.limit(capacity=2)
        task, _ = await bench.publish("t1", "t2")
        await bench.retry(task, 3600)
        await _has_room(bench, 1, of=2)
        assert await bench.control.cancel(KEY, "t1")
        await _has_room(bench, 0, of=2)

    @needs(Capability.DEAD_LETTERS)
    async def test_redriven_take_no_room(self, bench: Bench) -> None:
        """A redriven task returns even to a full queue (law 6)."""
        await bench.limit(capacity=1)
        subscription, delivery = await bench.running("dead")
        await bench.bury(subscription, delivery)
        await _has_room(bench, 1, of=1)
        assert await bench.dead_letters.redrive(KEY) == 1
        await bench.expect(waiting=2)
        assert len(await bench.take(subscription, 2)) == 2
        await _has_room(bench, 1, of=1)

    async def test_capacity_changes(self, bench: Bench) -> None:
        """A new capacity applies to the next publish; waiting tasks are kept and count against it (laws 6, 9)."""
        await bench.publish("t1", "t2", "t3", "t4")
        await bench.limit(capacity=2)
        (answer,) = await bench.offer("new")
        check_refused(answer, Refusal.QUEUE_FULL, depth=4)
        await bench.limit(capacity=5)
        await _has_room(bench, 1, of=5)
        await bench.limit(capacity=3)
        subscription = bench.subscribe()
        assert ids(await bench.take(subscription, 2)) == ["t1", "t2"]
        await _has_room(bench, 0, of=3)
        assert ids(await bench.take(subscription, 2)) == ["t3", "t4"]
        await _has_room(bench, 2, of=3)
        await bench.limit(capacity=None)
        await bench.publish(*(f"more{n}" for n in range(20)))

    async def test_intake_paused(self, bench: Bench) -> None:
        """While the intake is paused, new tasks are refused, but waiting tasks are delivered (laws 6, 9; B13)."""
        await bench.publish("t1")
        await bench.limit(intake_paused=True)
        answers = await bench.offer("t2", "t3")
        for answer in answers:
            check_refused(answer, Refusal.INTAKE_PAUSED)
        subscription = await bench.subscribed("elsewhere", key=OTHER)
        assert ids(await bench.take(subscription, 9)) == ["t1"]
        await bench.expect(in_flight=1)
        await bench.limit(intake_paused=False)
        await bench.publish("t2", "t3")

    async def test_publishers_side_by_side(self, bench: Bench) -> None:
        """Concurrent publishers fill a queue exactly to its capacity (laws 6, 10)."""
        await bench.limit(capacity=7)
        answers = await asyncio.gather(*(bench.offer(f"a{n}", f"b{n}") for n in range(10)))
        accepted = [a for pair in answers for a in pair if a.status is Published.ACCEPTED]
        assert len(accepted) == 7
        await bench.expect(waiting=7)

    @needs("shared")
    async def test_capacity_on_every_replica(self, bench: Bench) -> None:
        """Replicas share a queue's capacity, and apply each other's settings at once (laws 6, 9; F7)."""
        other = await bench.replica()
        await bench.publish("before")
        await other.limit(capacity=5)
        offers = [one.offer(f"{n}{m}") for n, one in enumerate((bench, other)) for m in range(5)]
        answers = await asyncio.gather(*offers)
        accepted = [a for (a,) in answers if a.status is Published.ACCEPTED]
        assert len(accepted) == 4
        await bench.limit(capacity=None, intake_paused=True)
        (answer,) = await other.offer("late")
        check_refused(answer, Refusal.INTAKE_PAUSED)

    @needs("durable")
    async def test_capacity_survives(self, bench: Bench) -> None:
        """After a restart, a durable queue has the same capacity and the same number of tasks (law 6; GOAL-AB)."""
        await bench.limit(capacity=3)
        await bench.publish("t1", "t2")
        await bench.one(bench.subscribe())
        heir = await bench.reopen()
        await _has_room(heir, 2, of=3)
        await heir.take(heir.subscribe(), 9)
        await _has_room(heir, 3, of=3)


def _names(bench: Bench, count: int) -> list[str]:
    """Return ``count`` task ids that have not been used before."""
    bench.numbers += count
    return [f"fresh{bench.numbers - n}" for n in range(count)]


async def _has_room(bench: Bench, room: int, *, of: int) -> None:
    """Fail unless the queue, whose capacity is ``of``, accepts exactly ``room`` more tasks."""
    *accepted, refused = await bench.offer(*_names(bench, room + 1))
    statuses = [answer.status for answer in accepted]
    assert statuses == [Published.ACCEPTED] * room, (
        f"the queue must have room for {room} more (law 6)"
    )
    check_refused(refused, Refusal.QUEUE_FULL, depth=of)
