"""The capability ``ordering_keys``: tasks with the same ordering key are executed one at a time."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import ack, bury, cancel, expire, frees, held, poison
from taskqueue_core.backend import Capability
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Published, State


class EntitiesSuite(Harness, needs=(Capability.ORDERING_KEYS,)):
    """Tests of ``ordering_key``."""

    @needs(Capability.CONTROL)
    async def test_one_at_a_time(self, bench: Bench) -> None:
        """At most one task per ordering key is in flight; other tasks are not blocked (law 4; R8, D2)."""
        await _publish(bench, e=3, f=2)
        await bench.publish("t1", "t2")
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        taken = await bench.take(subscription, 2)
        taken += await bench.take(two, 9)
        assert ids(taken) == ["e0", "f0", "t1", "t2"]
        await bench.expect(in_flight=4, waiting=3)
        assert await bench.state("e1") is State.WAITING
        await two.ack(taken[0])
        assert ids(await bench.take(two, 9)) == ["e1"]
        await subscription.ack(taken[1])
        assert ids(await bench.take(subscription, 9)) == ["f1"]

    async def test_one_of_a_batch(self, bench: Bench) -> None:
        """A receive returns one of 100 tasks with the same ordering key, and ``again`` becomes false (law 4; R8)."""
        await _publish(bench, e=100)
        subscription = bench.subscribe()
        received = await subscription.receive(100, 0)
        assert ids(received.deliveries) == ["e0"]
        await held(subscription)
        await subscription.ack(*received.deliveries)
        assert await bench.drain(subscription, count=3, limit=9) == ["e1", "e2", "e3"]

    async def test_order_over_priorities(self, bench: Bench) -> None:
        """Tasks with the same ordering key come in the order they became available, not by priority (law 4; R8)."""
        due = bench.now + bench.short
        entries = (("e0", 1, None), ("e3", 9, due), ("e1", 9, None), ("e2", 5, None))
        for name, priority, at in entries:
            await bench.publish(name, priority=priority, not_before=at, ordering_key="e")
        await bench.publish("t8", priority=8)
        await bench.publish("t2", priority=2)
        await bench.advance(bench.short)
        subscription = bench.subscribe()
        taken = await bench.eventually(subscription, 3)
        assert ids(taken) == ["t8", "t2", "e0"]
        await subscription.ack(*taken)
        assert await bench.drain(subscription, count=3) == ["e1", "e2", "e3"]

    async def test_its_old_place(self, bench: Bench) -> None:
        """A task that waited for its ordering key keeps its original position in the lane (law 4)."""
        await _publish(bench, e=3)
        subscription = await bench.subscribed("t1", "t2", "t3")
        first, second = await bench.take(subscription, 2)
        assert ids([first, second]) == ["e0", "t1"]
        await subscription.ack(first)
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["e1", "t2", "t3"]

    async def test_held_while_returned(self, bench: Bench) -> None:
        """A released or lost task comes before other tasks with its ordering key (laws 3, 4; fault F2)."""
        await _publish(bench, e=2)
        subscription = bench.subscribe()
        for lost in (False, True, False):
            await subscription.redeliver(await bench.one(subscription), lost=lost)
        await bench.publish("t1")
        other = bench.subscribe(consumer="another")
        taken = await bench.take(other, 9)
        assert ids(taken) == ["e0", "t1"]
        assert (taken[0].attempt, taken[0].losses) == (1, 1)
        await other.close()
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["e0", "t1"]
        await subscription.ack(taken[0])
        assert ids(await bench.take(subscription, 9)) == ["e1"]

    @needs("atomic_retry")
    async def test_held_while_retried(self, bench: Bench) -> None:
        """Until the retry of a failed task has ended, other tasks with its ordering key wait (laws 4, 8; R8)."""
        await _publish(bench, e=3)
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        await bench.retry(delivery.task, bench.short, settles=delivery)
        await bench.publish("t1")
        assert ids(await bench.take(subscription, 9)) == ["t1"]
        await bench.advance(bench.short)
        (again,) = await bench.eventually(subscription, 1)
        assert (again.task.id, again.attempt) == ("e0", 2)
        await held(subscription)
        await bench.retry(again.task)
        (third,) = await bench.eventually(subscription, 1)
        assert (third.task.id, third.attempt) == ("e0", 3)
        await subscription.ack(third)
        assert ids(await bench.take(subscription, 9)) == ["e1"]

    @needs(Capability.CONTROL)
    async def test_release_wakes(self, bench: Bench) -> None:
        """The end of a running task wakes a receive for the next task with the same ordering key (law 4; R8)."""
        await frees(bench, ack, ordering_key="e")
        await frees(bench, cancel, ordering_key="e")
        await frees(bench, expire, deadline=bench.short, ordering_key="e")

    @needs(Capability.DEAD_LETTERS, Capability.CONTROL)
    async def test_death_releases(self, bench: Bench) -> None:
        """A dead letter blocks no task; once redriven, it is the last task with its ordering key (laws 3, 4; R8)."""
        for end in (bury, poison):
            await frees(bench, end, ordering_key="e")
        assert await bench.dead_letters.discard(KEY) == 2
        await _publish(bench, e=3)
        subscription = bench.subscribe()
        await bench.bury(subscription, await bench.one(subscription))
        second = await bench.one(subscription)
        assert await bench.dead_letters.redrive(KEY) == 1
        await held(subscription)
        await subscription.ack(second)
        assert await bench.drain(subscription, count=2) == ["e2", "e0"]

    @needs(Capability.CONTROL)
    async def test_held_ones_end(self, bench: Bench) -> None:
        """A task that waits for its ordering key can be cancelled, and can expire (laws 1, 8; R8)."""
        await _publish(bench, e=2)
        await bench.publish("late", deadline=bench.now + bench.short, ordering_key="e")
        await bench.publish("e3", "e4", ordering_key="e")
        await bench.publish("late2", deadline=bench.now + 2 * bench.short, ordering_key="e")
        subscription, first = await bench.running("e5", ordering_key="e")
        assert await bench.control.cancel(KEY, "e1")
        assert await bench.control.cancel(KEY, "e4")
        await bench.advance(bench.short)
        expired = (await bench.control.maintain()).expired
        assert [entry.task_id for entry in expired] == ["late"]
        await bench.expect(in_flight=1, cancelled=2, expired=1, waiting=3)
        await bench.advance(bench.short)
        await subscription.ack(first)
        assert await bench.drain(subscription, count=2) == ["e3", "e5"]
        await bench.expect(done=3, cancelled=2, expired=2)

    @needs(Capability.CONTROL)
    async def test_purge_releases(self, bench: Bench) -> None:
        """A purge ends tasks that wait for an ordering key, so that only a running task blocks the key (laws 1, 4)."""
        await _publish(bench, e=4)
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        assert await bench.control.purge(KEY) == 3
        await bench.publish("next", ordering_key="e")
        await held(subscription)
        await subscription.ack(delivery)
        taken = await bench.take(subscription, 9)
        assert ids(taken) == ["next"]
        await subscription.redeliver(*taken)
        await _publish(bench, e=2, start=5)
        assert await bench.control.purge(KEY) == 3
        await _publish(bench, e=2, start=7)
        assert await bench.drain(subscription, count=2) == ["e7", "e8"]
        await bench.expect(done=3, cancelled=6)

    @needs(Capability.CONTROL)
    async def test_scheduled_hold_nothing(self, bench: Bench) -> None:
        """A scheduled task does not block its ordering key; once due, the task waits for its turn (laws 4, 8; R8)."""
        await bench.publish("e0", ordering_key="e", not_before=bench.now + bench.short)
        await _publish(bench, e=2, start=1)
        subscription = bench.subscribe()
        first = await bench.one(subscription)
        assert first.task.id == "e1"
        await bench.advance(bench.short)
        await _publish(bench, e=1, start=3)
        await bench.control.maintain()
        await held(subscription)
        await subscription.ack(first)
        assert await bench.drain(subscription, count=3) == ["e2", "e0", "e3"]

    @needs(Capability.CONTROL)
    async def test_retry_of_one_that_isheld(self, bench: Bench) -> None:
        """A retry of a task that was not delivered blocks no task, and waits for its ordering key (laws 4, 6, 8)."""
        await _publish(bench, e=3)
        subscription = bench.subscribe()
        first = await bench.one(subscription)
        waiting = bench.task("e1", ordering_key="e")
        assert await bench.retry(waiting, bench.short) is Published.ACCEPTED
        await bench.expect(in_flight=1, scheduled=1, waiting=1)
        await subscription.ack(first)
        second = await bench.one(subscription)
        assert second.task.id == "e2"
        await bench.advance(bench.short)
        await bench.control.maintain()
        await held(subscription)
        await _publish(bench, e=1, start=3)
        await subscription.ack(second)
        taken = await bench.eventually(subscription, 1)
        assert [(delivery.task.id, delivery.attempt) for delivery in taken] == [("e1", 2)]

    async def test_held_ones_are_known(self, bench: Bench) -> None:
        """The id of a task that waits for its ordering key is recognized as a duplicate (law 7)."""
        await _publish(bench, e=2)
        tasks = [
            bench.task("e1", ordering_key="e"),
            bench.task("e1", ordering_key="e", payload="other"),
            bench.task("e1", ordering_key="f"),
        ]
        expected = [Published.DUPLICATE, Published.CONFLICT, Published.DUPLICATE]
        assert await bench.statuses(*tasks) == expected
        await bench.expect(waiting=2)
        assert await bench.drain(bench.subscribe(), count=2) == ["e0", "e1"]

    async def test_entities_of_each_queue(self, bench: Bench) -> None:
        """An ordering key in one queue does not block the same key in another queue (law 4)."""
        await _publish(bench, e=2)
        await _publish(bench, e=2, key=OTHER)
        taken = await bench.take(bench.subscribe(KEY, OTHER), 9)
        assert sorted((d.task.key, d.task.id) for d in taken) == [(KEY, "e0"), (OTHER, "e0")]

    @needs(Capability.FAIR_ORDER, Capability.CONTROL)
    async def test_entities_and_tenants(self, bench: Bench) -> None:
        """Tasks of two tenants with the same ordering key keep their order; the tenants take turns (law 4; R8)."""
        await bench.fair(tenant_max_inflight=2)
        for name, tenant in (("e0", "a"), ("e1", "b"), ("e2", "a"), ("e3", "b")):
            await bench.publish(name, tenant=tenant, ordering_key="e")
        for tenant in "ab":
            await bench.publish(*(f"{tenant}{n}" for n in range(3)), tenant=tenant)
        subscription = bench.subscribe()
        taken = await bench.take(subscription, 9)
        assert sorted(ids(taken)) == ["a0", "b0", "b1", "e0"]
        order = ["e0"]
        while len(order) < 4:
            await subscription.ack(*taken)
            taken = await bench.take(subscription, 9)
            assert taken, f"nothing was delivered after {order}"
            order += [name for name in ids(taken) if name[0] == "e"]
        assert order == ["e0", "e1", "e2", "e3"]

    @needs(Capability.FAIR_ORDER, Capability.CONTROL)
    async def test_released_and_out_of_tokens(self, bench: Bench) -> None:
        """Once its ordering key is free, a task also waits for its tenant's next token (laws 4, 5; OPEN-F1)."""
        await bench.fair(tenant_rate_limit=RateLimit(max_tokens=2))
        subscription = await bench.subscribed("e0", "e1", "e2", tenant="a", ordering_key="e")
        assert await bench.drain(subscription, count=2) == ["e0", "e1"]
        received = await subscription.receive(5, 0)
        assert received.deliveries == (), "delivered without a token (law 5)"
        assert received.due_at is not None, "an empty answer must contain due_at"
        assert await bench.wakes(subscription.receive(5, None), bench.advance(0.5)) == ["e2"]

    @needs("durable")
    async def test_entity_survives(self, bench: Bench) -> None:
        """After a restart, tasks still wait for the earlier task with their ordering key (law 4; GOAL-AB)."""
        await _publish(bench, e=3)
        await bench.one(bench.subscribe())
        heir = await bench.reopen()
        subscription = heir.subscribe()
        (delivery,) = await heir.eventually(subscription, 1)
        assert delivery.task.id == "e0"
        await held(subscription)
        await subscription.ack(delivery)
        assert await heir.drain(subscription, count=2) == ["e1", "e2"]

    async def test_many_entities(self, bench: Bench) -> None:
        """Five workers run tasks of 1,000 ordering keys, one by one and in order for each key (law 4; R8, fault F1)."""
        for step in range(3):
            tasks = [bench.task(f"{n}-{step}", ordering_key=f"e{n}") for n in range(1000)]
            for start in range(0, 1000, 250):
                await bench.offer(*tasks[start : start + 250])
        running: set[str] = set()
        order: dict[str, list[str]] = defaultdict(list)

        async def work(number: int) -> None:
            subscription = bench.subscribe(consumer=f"w{number}")
            while (received := await subscription.receive(100, 0)).deliveries or received.again:
                for delivery in received.deliveries:
                    entity = delivery.task.ordering_key
                    assert entity is not None
                    assert entity not in running, (
                        f"two tasks with the ordering key {entity} are in flight (law 4)"
                    )
                    running.add(entity)
                    order[entity].append(delivery.task.id.split("-")[1])
                await asyncio.sleep(0)
                running.difference_update(d.task.ordering_key or "" for d in received.deliveries)
                await subscription.ack(*received.deliveries)

        await asyncio.gather(*(work(number) for number in range(5)))
        await work(9)
        await bench.expect(done=3000)
        wrong = {entity: steps for entity, steps in order.items() if steps != ["0", "1", "2"]}
        assert not wrong, f"out of order: {wrong} (law 4)"


async def _publish(bench: Bench, *, start: int = 0, key: str = KEY, **counts: int) -> None:
    """Publish tasks for each ordering key in ``counts``: ``e=2`` publishes ``e0`` and ``e1`` with the key ``e``."""
    for entity, count in counts.items():
        names = [f"{entity}{n}" for n in range(start, start + count)]
        await bench.publish(*names, key=key, ordering_key=entity)
