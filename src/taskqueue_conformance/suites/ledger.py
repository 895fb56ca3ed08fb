"""The ledger: every entry is in exactly one state, at every moment."""

from __future__ import annotations

import asyncio

from taskqueue_conformance.bench import KEY, OTHER, Bench
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.consumer.settle import settle
from taskqueue_core.retry import ScheduleRetry
from taskqueue_core.tasks import Ledger


class LedgerSuite(Harness, needs=(Capability.CONTROL,)):
    """Tests that the ledger is correct after every step (law 1)."""

    @needs(Capability.DEAD_LETTERS, "atomic_retry")
    async def test_every_arrow(self, bench: Bench) -> None:
        """Each transition moves an entry from one count to another count, and changes no other count (law 1; C26)."""
        subscription = bench.subscribe()
        await bench.expect()
        await bench.publish("t1", "t2", "t3")
        await bench.expect(waiting=3)
        await bench.publish("t4", not_before=bench.now + bench.short)
        await bench.expect(waiting=3, scheduled=1)
        delivery, two = await bench.take(subscription, 2)
        await bench.expect(waiting=1, scheduled=1, in_flight=2)
        await subscription.redeliver(delivery)
        await bench.expect(waiting=2, scheduled=1, in_flight=1)
        await settle(bench.backend, subscription, two, ScheduleRetry(bench.short, "failed"))
        await bench.expect(waiting=2, scheduled=2)
        await bench.bury(subscription, await bench.one(subscription))
        await bench.expect(waiting=1, scheduled=2, dead=1)
        await bench.dead_letters.redrive(KEY, "t1")
        await bench.expect(waiting=2, scheduled=2)
        three, delivery = await bench.take(subscription, 2)
        await bench.bury(subscription, delivery)
        await bench.dead_letters.discard(KEY)
        await bench.expect(in_flight=1, scheduled=2, discarded=1)
        await bench.control.cancel(KEY, three.task.id)
        await bench.expect(cancelled=1, scheduled=2, discarded=1)
        await bench.advance(bench.short)
        await bench.control.maintain()
        await bench.expect(cancelled=1, waiting=2, discarded=1)
        await subscription.ack(*await bench.take(subscription, 2))
        await bench.expect(cancelled=1, done=2, discarded=1)
        await bench.retry(three.task, 3600)
        await bench.expect(cancelled=1, done=2, discarded=1, scheduled=1)
        assert await bench.control.purge(KEY) == 1
        await bench.expect(cancelled=2, done=2, discarded=1)

    async def test_refusals_count_nothing(self, bench: Bench) -> None:
        """Duplicates, conflicts and stale receipts change no count (laws 1, 2, 7)."""
        subscription, delivery = await bench.running("t1")
        await bench.offer("t1", bench.task("t1", payload="other"))
        assert await bench.control.ledger(KEY) == Ledger(published=1, in_flight=1)
        await subscription.ack(delivery)
        await subscription.redeliver(delivery, delivery)
        await subscription.ack(delivery)
        assert await bench.control.ledger(KEY) == Ledger(published=1, done=1)

    async def test_equals_the_listing(self, bench: Bench) -> None:
        """The counts of the ledger match the statuses of the tasks (law 1)."""
        names = [f"t{n}" for n in range(30)]
        await bench.publish(*names[:20])
        subscription = await bench.subscribed(*names[20:], not_before=bench.now + 3600)
        taken = await bench.take(subscription, 12)
        await subscription.ack(*taken[:5])
        await subscription.redeliver(*taken[5:8])
        await bench.control.cancel(KEY, names[25])
        listed = dict.fromkeys(Ledger.__struct_fields__, 0) | {"published": len(names)}
        for status in await bench.control.statuses(KEY, *names):
            assert status is not None
            listed[status.state.value] += 1
        assert await bench.control.ledger(KEY) == Ledger(**listed)

    async def test_queues_are_apart(self, bench: Bench) -> None:
        """A queue's ledger counts only its own entries."""
        await bench.publish("t1", "t2")
        await bench.publish("t1", key=OTHER)
        subscription = bench.subscribe(OTHER)
        await subscription.ack(await bench.one(subscription))
        assert await bench.control.ledger(KEY) == Ledger(published=2, waiting=2)
        assert await bench.control.ledger(OTHER) == Ledger(published=1, done=1)

    async def test_balanced_under_load(self, bench: Bench) -> None:
        """The ledger balances at every moment while clients publish, receive and settle (law 1)."""

        async def produce(name: str) -> None:
            for number in range(20):
                await bench.publish(f"{name}-{number}")
                await bench.hop(1)

        async def consume(name: str) -> None:
            async with bench.subscribe(consumer=name) as subscription:
                for number in range(25):
                    taken = await bench.take(subscription, 2)
                    await bench.hop(1)
                    if number % 3:
                        await subscription.ack(*taken)
                    else:
                        await subscription.redeliver(*taken, lost=bool(number % 2))

        async def audit() -> None:
            for _ in range(50):
                ledger = await bench.control.ledger(KEY)
                assert ledger.balanced, f"out of balance: {ledger} (law 1)"
                await bench.hop(1)

        producers = [produce(f"p{n}") for n in range(3)]
        await asyncio.gather(*producers, *(consume(f"c{n}") for n in range(3)), audit())
        ledger = await bench.control.ledger(KEY)
        assert (ledger.published, ledger.in_flight, ledger.imbalance) == (60, 0, 0)
