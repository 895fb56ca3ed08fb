"""``shared`` and ``durable``: several backends share one store, and its data survives a restart."""

from __future__ import annotations

import asyncio

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Ledger, Published, Settled


class ReplicasSuite(Harness):
    """Tests of shared and durable backends."""

    @needs("shared")
    async def test_seen_by_all(self, bench: Bench) -> None:
        """A task that one replica publishes can be delivered and settled by another replica (law 2; E1)."""
        other = await bench.replica()
        await bench.publish("t1", "t2")
        here, there = bench.subscribe(), other.subscribe(consumer="another")
        first, second = await other.one(there), await bench.one(here)
        assert ids([first, second]) == ["t1", "t2"]
        assert await here.ack(first) == (Settled.OK,)
        assert await there.redeliver(second) == (Settled.OK,)
        assert ids(await bench.take(here, 2)) == ["t2"]

    @needs("shared")
    async def test_wakes_across(self, bench: Bench) -> None:
        """A publish, a release or a close at one replica wakes a receive at another replica (E1)."""
        other = await bench.replica()
        here, there = bench.subscribe(), other.subscribe(consumer="another")
        waiting = await other.start(there.receive(1, None))
        await bench.publish("t1")
        (delivery,) = (await other.outcome(waiting)).deliveries
        assert await bench.wakes(here.receive(1, None), there.redeliver(delivery)) == ["t1"]
        assert await other.wakes(there.receive(1, None), here.close()) == ["t1"]

    @needs("shared")
    async def test_close_releases_its_own(self, bench: Bench) -> None:
        """Closing a subscription of one replica leaves the deliveries of another replica alone (law 2)."""
        other = await bench.replica()
        await bench.publish("t1", "t2")
        here, there = bench.subscribe(), other.subscribe(consumer="another")
        delivery = await bench.one(here)
        await other.one(there)
        await there.close()
        assert ids(await bench.take(here, 2)) == ["t2"]
        assert await here.ack(delivery) == (Settled.OK,)

    @needs("shared")
    async def test_order_across(self, bench: Bench) -> None:
        """Tasks of several replicas are delivered in the order in which they were published (law 4)."""
        other = await bench.replica()
        names = [f"t{number}" for number in range(8)]
        for number, name in enumerate(names):
            await (other if number % 3 else bench).publish(name)
        assert ids(await other.take(other.subscribe(), 9)) == names

    @needs(Capability.CONTROL, "shared")
    async def test_changed_settings_reach_every_replica(self, bench: Bench) -> None:
        """A replica that has already read the settings of a queue follows each later change (law 9)."""
        other = await bench.replica()
        for losses in (3, 0):
            await bench.configure(max_losses=losses)
            assert (await other.control.settings(KEY)).max_losses == losses
        there, delivery = await other.running("t1")
        assert await there.redeliver(delivery, lost=True) == (Settled.DEAD,)

    @needs(Capability.CONTROL, "shared")
    async def test_opening_disturbs_nothing(self, bench: Bench) -> None:
        """A replica that opens the store and runs maintenance does not affect other replicas' deliveries (law 2)."""
        subscription, delivery = await bench.running("t1")
        other = await bench.replica()
        await other.control.maintain()
        assert await other.take(other.subscribe(consumer="another")) == []
        assert await subscription.ack(delivery) == (Settled.OK,)

    @needs("shared")
    async def test_one_copy_across(self, bench: Bench) -> None:
        """A task that is published at two replicas is stored once (law 7)."""
        other = await bench.replica()
        await bench.publish("t1")
        assert await other.statuses("t1") == [Published.DUPLICATE]

    @needs(Capability.HANDOVER, "shared")
    async def test_adopted_across(self, bench: Bench) -> None:
        """A worker that reconnects to another replica keeps its deliveries (law 2; D7)."""
        other = await bench.replica()
        here, delivery = await bench.running("t1")
        there = other.subscribe()
        (adopted,) = await other.adopt(there, delivery.receipt)
        assert adopted is not None
        assert adopted.receipt == delivery.receipt
        await here.close()
        assert await there.ack(delivery) == (Settled.OK,)

    @needs(Capability.CONTROL, "shared")
    async def test_one_view_for_operators(self, bench: Bench) -> None:
        """Every replica shows the same ledger, settings and workers (laws 1, 9)."""
        other = await bench.replica()
        settings = await bench.configure(max_losses=0)
        assert await other.control.settings(KEY) == settings
        await bench.publish("t1")
        await bench.subscribe(consumer="here").receive(1, 0)
        await other.subscribe(consumer="there").receive(1, 0)
        assert await other.control.ledger(KEY) == Ledger(published=1, in_flight=1)
        workers = [worker.worker_id for worker in await other.control.workers()]
        assert sorted(workers) == ["here", "there"]

    @needs(Capability.CONTROL, "shared")
    async def test_maintenance_at_once(self, bench: Bench) -> None:
        """Concurrent maintenance by several replicas expires each task once (law 10; OPEN-A3)."""
        other = await bench.replica()
        controls = [bench.control, other.control]
        await bench.publish(*(f"t{n}" for n in range(20)), deadline=bench.now + bench.short)
        await bench.advance(bench.short)
        passes = await asyncio.gather(*(control.maintain() for control in controls * 3))
        assert len([entry for done in passes for entry in done.expired]) == 20
        await bench.expect(expired=20)

    @needs("durable")
    async def test_tasks_survive(self, bench: Bench) -> None:
        """Waiting, scheduled and running tasks survive a restart, in order (laws 1, 4; A1)."""
        await bench.publish("t1", "t2", "t3")
        subscription, delivery = await bench.running("due", not_before=bench.now + bench.short)
        await subscription.redeliver(delivery, lost=True)
        await bench.one(subscription)
        after = await bench.reopen()
        await after.advance(bench.short)
        taken = await after.take(after.subscribe(), 5)
        assert ids(taken) == ["t1", "t2", "t3", "due"]
        assert [(d.attempt, d.losses) for d in taken] == [(1, 1), (1, 0), (1, 0), (1, 0)]

    @needs("durable")
    async def test_memory_survives(self, bench: Bench) -> None:
        """Settled receipts, known ids and the ledger survive a restart (laws 1, 2, 7)."""
        subscription, acked, stale = await bench.all_running("acked", "open")
        await subscription.ack(acked)
        after = await bench.reopen()
        subscription = after.subscribe()
        assert await subscription.ack(acked) == (Settled.OK,), "a repeated ack was refused"
        await bench.stale(subscription.ack(stale))
        assert await after.statuses("acked") == [Published.DUPLICATE], "accepted again (law 7)"
        await after.expect(done=1, waiting=1)

    @needs(Capability.DEAD_LETTERS, Capability.CONTROL, "durable")
    async def test_dead_letters_survive(self, bench: Bench) -> None:
        """Dead letters and results survive a restart (C26)."""
        subscription, dead, done = await bench.all_running("dead", "done")
        await bench.bury(subscription, dead)
        await subscription.ack(done, results=[b"1"])
        before = await bench.dead_letters.list(KEY)
        after = await bench.reopen()
        assert await after.dead_letters.list(KEY) == before
        assert await after.control.results(KEY, "done") == (b"1",)
