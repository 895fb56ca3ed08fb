"""Delivery: each lane keeps its order, no key starves another key, and each task goes to one consumer."""

from __future__ import annotations

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_core.tasks import Delivery


class DeliverSuite(Harness):
    """Tests of `Subscription.receive` with a timeout of 0."""

    async def test_first_delivery(self, bench: Bench) -> None:
        """A new task has attempt 1, no losses, no earlier attempts, and a delivery time on the store's clock."""
        await bench.publish("t1")
        before = bench.now
        delivery = await bench.one(bench.subscribe())
        assert (delivery.attempt, delivery.losses, delivery.prior) == (1, 0, 0)
        assert before - bench.short <= delivery.delivered_at <= bench.now + bench.short

    async def test_fifo(self, bench: Bench) -> None:
        """Tasks of one priority come in the order of publishing, however they are batched (law 4; D2, BUG-D1)."""
        await bench.publish("t1")
        await bench.publish("t2", "t3", "t4")
        subscription = await bench.subscribed("t5")
        first = ids(await bench.take(subscription, 2))
        assert first + ids(await bench.take(subscription, 9)) == ["t1", "t2", "t3", "t4", "t5"]

    async def test_fifo_one_by_one(self, bench: Bench) -> None:
        """Tasks that are received and acked one at a time come in the order of publishing (law 4; D2, BUG-D1)."""
        names = [f"t{n}" for n in range(12)]
        subscription = await bench.subscribed(*names)
        observed = []
        for _ in names:
            delivery = await bench.one(subscription)
            await subscription.ack(delivery)
            observed.append(delivery.task.id)
        assert observed == names

    async def test_priorities(self, bench: Bench) -> None:
        """Higher priorities come first; each priority keeps the order of publishing (law 4; FIX-C1, OPEN-C6)."""
        for number, priority in enumerate([5, 0, 9, 5, 9, 0, 4, 6]):
            await bench.publish(f"p{priority}-{number}", priority=priority)
        taken = ids(await bench.take(bench.subscribe(), 8))
        assert taken == ["p9-2", "p9-4", "p6-7", "p5-0", "p5-3", "p4-6", "p0-1", "p0-5"]

    async def test_strict_without_a_share(self, bench: Bench) -> None:
        """Without ``floor_share``, no task of a low priority is delivered while a higher priority waits (law 4)."""
        await bench.publish(*(f"high{n}" for n in range(60)), priority=8)
        await bench.publish(*(f"low{n}" for n in range(5)), priority=1)
        taken = await bench.drain(bench.subscribe(), count=62, limit=7)
        assert taken == [*(f"high{n}" for n in range(60)), "low0", "low1"]

    async def test_priority_of_latecomers(self, bench: Bench) -> None:
        """A new task with a higher priority overtakes all waiting tasks with lower priorities (law 4)."""
        await bench.publish(*(f"low{n}" for n in range(50)), priority=1)
        await bench.advance(bench.short)
        subscription = bench.subscribe()
        for number in range(3):
            await bench.publish(f"high{number}", priority=2)
            assert ids([await bench.one(subscription)]) == [f"high{number}"]
        assert ids([await bench.one(subscription)]) == ["low0"]

    async def test_limit(self, bench: Bench) -> None:
        """A receive never returns more deliveries than its limit."""
        subscription = await bench.subscribed(*(f"t{n}" for n in range(10)))
        for limit in (1, 2, 3):
            received = await subscription.receive(limit, 0)
            assert 1 <= len(received.deliveries) <= limit

    async def test_empty_is_an_answer(self, bench: Bench) -> None:
        """A receive from an empty queue returns an empty answer at once, and raises no exception."""
        received = await bench.subscribe().receive(5, 0)
        assert received.deliveries == ()
        assert received.expired == ()

    async def test_again(self, bench: Bench) -> None:
        """``again`` is true while more tasks are available, and becomes false after the last one."""
        subscription = await bench.subscribed(*(f"t{n}" for n in range(5)))
        taken = 0
        for _ in range(20):
            received = await subscription.receive(2, 0)
            taken += len(received.deliveries)
            assert received.again or taken == 5, (
                f"`again` is false, but only {taken} of 5 tasks were delivered"
            )
            if not received.again and not received.deliveries:
                return
        raise AssertionError(
            "`again` is still true after the last task: consumers would poll without end"
        )

    async def test_one_consumer_each(self, bench: Bench) -> None:
        """Subscriptions share the tasks of a queue: each task is delivered to one subscription (law 2)."""
        await bench.publish("t1", "t2", "t3")
        subscription, two = bench.subscribe(), bench.subscribe(consumer="another")
        taken = await bench.take(subscription, 2) + await bench.take(two, 2)
        assert ids(taken) == ["t1", "t2", "t3"]
        assert len({delivery.receipt for delivery in taken}) == 3
        assert await bench.take(subscription) == await bench.take(two) == []

    async def test_own_keys_only(self, bench: Bench) -> None:
        """A subscription receives only tasks of its own keys."""
        await bench.publish("t1")
        await bench.publish("t2", key=OTHER)
        assert ids(await bench.take(bench.subscribe(OTHER), 2)) == ["t2"]

    async def test_receipts_cannot_be_guessed(self, bench: Bench) -> None:
        """All receipts are different, even those of the same task, and too long to be guessed."""
        subscription = await bench.subscribed("t1")
        receipts = set()
        for _ in range(20):
            delivery = await bench.one(subscription)
            receipts.add(delivery.receipt)
            await subscription.redeliver(delivery)
        assert len(receipts) == 20
        assert all(len(receipt) >= 16 for receipt in receipts)

    async def test_no_key_starves_one_by_one(self, bench: Bench) -> None:
        """If tasks are received one by one, 1,000 tasks of one key do not starve a task of another key (law 4; E5)."""
        await _flooded(bench, 1)

    async def test_no_key_starves_in_batches(self, bench: Bench) -> None:
        """If tasks are received in batches, 1,000 tasks of one key do not starve a task of another key (law 4; E5)."""
        await _flooded(bench, 20)

    async def test_keys_take_turns(self, bench: Bench) -> None:
        """A subscription to three keys with many tasks gets tasks of each key (law 4; E5, OPEN-E1)."""
        keys = ("k1", "k2", "k3")
        for key in keys:
            await bench.publish(*(f"{key}-{n}" for n in range(30)), key=key)
        subscription = bench.subscribe(*keys)
        served = [(await bench.one(subscription)).task.key for _ in range(30)]
        for key in keys:
            assert served.count(key) >= 5, f"{key} got {served.count(key)} of 30 turns (law 4)"

    async def test_higher_priority_does_not_starve_another_key(self, bench: Bench) -> None:
        """Priorities apply within one key; they do not let one key starve another key (law 4)."""
        await bench.publish(*(f"t{n}" for n in range(100)), priority=9)
        await bench.publish("quiet", key=OTHER, priority=0)
        subscription = bench.subscribe(KEY, OTHER)
        assert "quiet" in ids(await bench.take(subscription, 50))

    async def test_tenants_of_fifo(self, bench: Bench) -> None:
        """With fifo order, tenants do not affect the order of delivery (law 4)."""
        for tenant, names in (("a", ("a0", "a1", "a2")), ("b", ("b0", "b1"))):
            await bench.publish(*names, tenant=tenant)
        taken = await bench.take(bench.subscribe(), 9)
        assert ids(taken) == ["a0", "a1", "a2", "b0", "b1"]
        assert [delivery.task.tenant for delivery in taken] == ["a", "a", "a", "b", "b"]


async def _flooded(bench: Bench, limit: int) -> None:
    await bench.publish(*(f"t{n}" for n in range(1000)))
    await bench.publish("quiet", key=OTHER)
    for keys in ((KEY, OTHER), (OTHER, KEY)):
        subscription = bench.subscribe(*keys)
        taken: list[Delivery] = []
        while len(taken) < 100 and "quiet" not in ids(taken):
            taken += await bench.take(subscription, limit)
        assert "quiet" in ids(taken), f"{OTHER} starves behind a flooded {KEY} (law 4)"
        await subscription.redeliver(*taken)
