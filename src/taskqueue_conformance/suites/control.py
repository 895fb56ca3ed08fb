"""The capability ``control``: settings, cancelling, workers, statistics and maintenance."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.partitions import after
from taskqueue_conformance.selection import needs
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import Owner, QueueSettings
from taskqueue_core.errors import QueueInUse, SettingsConflict
from taskqueue_core.tasks import Ledger, Published, Settled, State
from taskqueue_core.uniqueness import UniqueKey


class ControlSuite(Harness, needs=(Capability.CONTROL,)):
    """Tests of `Control`."""

    async def test_queues_without_a_subscriber(self, bench: Bench) -> None:
        """Maintenance reports queues that have waiting tasks but no subscriber (A21, OPEN-A3, OPEN-A4)."""
        await bench.publish("t1")
        await bench.publish("t2", key=OTHER)
        worker = bench.subscribe(OTHER)
        await worker.receive(1, 0)
        assert (await bench.control.maintain()).unclaimed == (KEY,)
        subscription = bench.subscribe(KEY)
        delivery = await bench.one(subscription)
        assert (await bench.control.maintain()).unclaimed == ()
        await subscription.redeliver(delivery)
        await subscription.close()
        assert (await bench.control.maintain()).unclaimed == (KEY,)
        assert await bench.control.cancel(KEY, "t1")
        assert (await bench.control.maintain()).unclaimed == (), (
            "a queue without waiting tasks was reported"
        )

    async def test_queues(self, bench: Bench) -> None:
        """A queue is listed once it has a task, settings or a subscription that was used; the list is sorted."""
        assert await bench.control.queues() == ()
        await bench.publish("t1", key="published")
        bench.subscribe("subscribed")
        await bench.subscribe("received").receive(1, 0)
        await bench.control.configure("configured", QueueSettings(max_losses=1))
        queues = await bench.control.queues()
        assert {"published", "received", "configured"} <= set(queues)
        assert list(queues) == sorted(queues)

    async def test_unknown_queue(self, bench: Bench) -> None:
        """An unknown queue is empty, has the default settings, and contains nothing to cancel."""
        assert await bench.control.ledger("unknown") == Ledger()
        assert await bench.control.settings("unknown") == QueueSettings()
        stats = await bench.control.stats("unknown")
        assert (stats.key, stats.ledger, stats.oldest_waiting) == ("unknown", Ledger(), None)
        assert await bench.control.statuses("unknown", "t1") == (None,)
        assert await bench.control.results("unknown", "t1") == (None,)
        assert not await bench.control.cancel("unknown", "t1")
        assert await bench.control.purge("unknown") == 0

    async def test_settings(self, bench: Bench) -> None:
        """Settings are stored unchanged for their queue only; each change increases their version by 1 (law 9)."""
        wished = QueueSettings(max_losses=7, dedupe_window=11.5, result_ttl=0)
        confirmed = await bench.control.configure(KEY, wished)
        assert confirmed == wished.model_copy(update={"version": 1})
        assert await bench.control.settings(KEY) == confirmed
        again = await bench.control.configure(KEY, confirmed)
        assert again.version == 2
        assert await bench.control.settings(OTHER) == QueueSettings(), "both queues were changed"

    async def test_owners(self, bench: Bench) -> None:
        """The owners of fields are stored with the settings; a change keeps those that it names (law 9; U4)."""
        owners = {"retry": Owner.DECLARED, "result_ttl": Owner.OPERATOR}
        confirmed = await bench.control.configure(KEY, QueueSettings(result_ttl=5, owners=owners))
        assert confirmed.owners == owners
        assert await bench.control.settings(KEY) == confirmed
        changed = confirmed.model_copy(update={"owners": {"retry": Owner.OPERATOR}})
        assert (await bench.control.configure(KEY, changed)).owners == {"retry": Owner.OPERATOR}
        assert (await bench.control.settings(KEY)).owners == {"retry": Owner.OPERATOR}

    async def test_settings_conflict(self, bench: Bench) -> None:
        """A change that is based on an old version of the settings is refused, and changes nothing."""
        current = await bench.control.configure(KEY, QueueSettings(max_losses=1))
        for version in (0, 2):
            with pytest.raises(SettingsConflict):
                await bench.control.configure(KEY, QueueSettings(version=version, max_losses=9))
        assert await bench.control.settings(KEY) == current

    async def test_settings_race(self, bench: Bench) -> None:
        """Of several concurrent changes based on the same version, exactly one is accepted (law 10)."""
        wishes = [QueueSettings(max_losses=n) for n in range(10)]
        answers = await asyncio.gather(
            *(bench.control.configure(KEY, wish) for wish in wishes), return_exceptions=True
        )
        won = [answer for answer in answers if isinstance(answer, QueueSettings)]
        assert len(won) == 1, f"{len(won)} of 10 changes to one version were accepted"
        assert await bench.control.settings(KEY) == won[0]

    async def test_cancel(self, bench: Bench) -> None:
        """A live task can be cancelled in any state; the receipt of a running task is then stale (laws 1, 2)."""
        await bench.publish("running", "waiting")
        later = bench.now + bench.short
        subscription, delivery = await bench.running("scheduled", not_before=later)
        for task_id in ("running", "waiting", "scheduled"):
            assert await bench.control.cancel(KEY, task_id), f"the {task_id} task was not cancelled"
            assert not await bench.control.cancel(KEY, task_id), "cancelled twice"
            assert await bench.state(task_id) is State.CANCELLED
        await bench.stale(subscription.ack(delivery))
        await bench.advance(bench.short)
        assert await bench.take(subscription) == [], "a cancelled task was delivered"
        await bench.expect(cancelled=3)

    @needs(Capability.DEAD_LETTERS)
    async def test_cancel_what_is_not_live(self, bench: Bench) -> None:
        """A task that has ended, is dead or is unknown cannot be cancelled (law 2)."""
        subscription, delivery = await bench.running("done", "dead")
        await subscription.ack(delivery)
        assert not await bench.control.cancel(KEY, "done")
        assert not await bench.control.cancel(KEY, "unknown")
        assert not await bench.control.cancel(OTHER, "dead")
        await bench.bury(subscription, await bench.one(subscription))
        assert not await bench.control.cancel(KEY, "dead")
        await bench.expect(done=1, dead=1)

    async def test_purge(self, bench: Bench) -> None:
        """A purge cancels the waiting and scheduled tasks of its queue, but no running tasks (law 1)."""
        await bench.publish("running", "returned", *(f"t{n}" for n in range(20)))
        await bench.publish("scheduled", not_before=bench.now + bench.short)
        subscription = await bench.subscribed("other", key=OTHER)
        running, returned = await bench.take(subscription, 2)
        await subscription.redeliver(returned)
        assert await bench.control.purge(KEY) == 22
        assert await bench.control.purge(KEY) == 0
        await bench.advance(bench.short)
        assert await bench.take(subscription) == [], "a purged task was delivered"
        await subscription.ack(running)
        await bench.expect(done=1, cancelled=22)
        assert (await bench.control.ledger(OTHER)).waiting == 1

    async def test_purge_is_exact(self, bench: Bench) -> None:
        """A purge cancels every earlier task and no later task (laws 1, 10; issue 21).

        An earlier task is cancelled even if it becomes due during the purge.
        """
        old = [f"waiting{n}" for n in range(1200)]
        soon, late = [f"soon{n}" for n in range(600)], [f"late{n}" for n in range(600)]
        await bench.publish(*old)
        await bench.publish(*soon, not_before=bench.now + bench.short)
        await bench.publish(*late, not_before=bench.now + 3600)
        purge = asyncio.ensure_future(bench.control.purge(KEY))
        new: list[str] = []
        while not purge.done():
            await asyncio.sleep(0)
            if not (await bench.control.ledger(KEY)).cancelled:
                continue  # the purge may not have begun yet
            new.append(f"new{len(new)}")
            at = None if len(new) % 2 else bench.now + 1800
            await bench.publish(new[-1], not_before=at)
            if len(new) == 1:
                await bench.advance(bench.short)
                await bench.control.maintain()
        assert await purge == 2400
        states = [await bench.state(name) for name in (*old[::100], *soon[::100], *late[::100])]
        assert set(states) == {State.CANCELLED}
        waiting = (len(new) + 1) // 2
        await bench.expect(cancelled=2400, waiting=waiting, scheduled=len(new) - waiting)

    async def test_workers(self, bench: Bench) -> None:
        """A worker is listed while at least one of its subscriptions is open (REV-E5)."""
        await bench.publish("t1", "t2")
        subscription = bench.subscribe(KEY, consumer="w")
        two = bench.subscribe(KEY, OTHER, consumer="w")
        alone = bench.subscribe(OTHER, consumer="alone")
        await bench.one(subscription)
        await bench.one(two)
        await alone.receive(1, 0)
        known = {worker.worker_id: worker for worker in await bench.control.workers()}
        assert sorted(known) == ["alone", "w"]
        assert (known["w"].connections, known["w"].in_flight) == (2, 2)
        assert sorted(known["w"].keys) == [KEY, OTHER]
        assert known["w"].since <= bench.now
        await subscription.close()
        known = {worker.worker_id: worker for worker in await bench.control.workers()}
        assert (known["w"].connections, known["w"].in_flight) == (1, 1), (
            "one subscription is still open"
        )
        await two.close()
        await alone.close()
        assert await bench.control.workers() == ()

    async def test_stats(self, bench: Bench) -> None:
        """Statistics count deliveries, redeliveries, losses and retries, and contain the ledger (law 1)."""
        since = bench.now
        subscription = await bench.subscribed("t1", "t2", "t3")
        delivery, two = await bench.take(subscription, 2)
        await subscription.redeliver(delivery)
        await subscription.redeliver(two, lost=True)
        await subscription.ack(await bench.one(subscription))
        await bench.retry(delivery.task, 3600)
        stats = await bench.control.stats(KEY)
        assert stats.ledger == await bench.control.ledger(KEY)
        assert (stats.delivered, stats.redelivered, stats.lost, stats.retried) == (3, 2, 1, 1)
        assert stats.subscribers == 1
        assert stats.oldest_waiting is not None
        assert since - bench.short <= stats.oldest_waiting <= bench.now

    async def test_maintain_is_idempotent(self, bench: Bench) -> None:
        """Maintenance can be repeated, and does not affect live tasks that are not due (law 10; OPEN-A3)."""
        await bench.publish("running", "waiting")
        subscription, delivery = await bench.running("scheduled", not_before=bench.now + 3600)
        for _ in range(3):
            done = await bench.control.maintain()
            assert (done.promoted, done.expired, done.forgotten, done.recovered) == (0, (), 0, 0)
        await bench.expect(in_flight=1, waiting=1, scheduled=1)
        await subscription.ack(delivery)
        assert ids([await bench.one(subscription)]) == ["waiting"]

    async def test_maintain_from_everywhere_at_once(self, bench: Bench) -> None:
        """Concurrent maintenance passes expire each task, or make it available, only once (laws 1, 8, 10; OPEN-A3)."""
        await bench.publish(*(f"late{n}" for n in range(20)), deadline=bench.now + bench.short)
        await bench.publish(*(f"due{n}" for n in range(20)), not_before=bench.now + bench.short)
        await bench.advance(bench.short)
        expired: list[str] = []
        for _ in range(3):
            passes = await asyncio.gather(*(bench.control.maintain() for _ in range(5)))
            expired += [entry.task_id for done in passes for entry in done.expired]
        assert sorted(expired) == sorted(f"late{n}" for n in range(20))
        assert len(await bench.take(bench.subscribe(), 50)) == 20
        await bench.expect(in_flight=20, expired=20)

    async def test_maintain_keeps_up(self, bench: Bench) -> None:
        """A pass that leaves work undone sets ``behind``, and ``again_in`` for the next pass (law 10; issue 21)."""
        names = [f"t{n}" for n in range(4500)]
        await bench.publish(*names, deadline=bench.now + bench.short)
        await bench.advance(2 * bench.short)
        expired: list[str] = []
        while True:
            done = await bench.control.maintain()
            expired += [entry.task_id for entry in done.expired]
            if done.behind is None:
                break
            assert done.behind >= 0
            assert done.again_in is not None, "work is left, but again_in is None (law 10)"
        assert sorted(expired) == sorted(names), (
            "no work was left, but tasks have not expired (law 10)"
        )

    async def test_what_runs_on_and_on(self, bench: Bench) -> None:
        """Without ``max_processing_time``, a delivery is never ended for lack of progress (OPEN-C3)."""
        subscription, delivery = await bench.running("long")
        await bench.advance(20 * bench.short)
        for _ in range(3):
            assert (await bench.control.maintain()).recovered == 0
        assert await subscription.ack(delivery) == (Settled.OK,)

    async def test_maintain_forgets(self, bench: Bench) -> None:
        """Ended tasks are deleted after ``dedupe_window`` and ``result_ttl``, but still count in the ledger (law 1)."""
        await bench.configure(dedupe_window=bench.short, result_ttl=bench.short)
        subscription, delivery = await bench.running("t1", "t2")
        await subscription.ack(delivery, results=[b"1"])
        await bench.control.maintain()
        assert await bench.state("t1") is State.DONE, "forgotten within its window (law 7)"
        await bench.advance(bench.short * 1.5)
        await bench.control.maintain()
        assert await bench.state("t1") is None, "not forgotten after its windows"
        assert await bench.state("t2") is State.WAITING
        await bench.expect(done=1, waiting=1)

    async def test_delete(self, bench: Bench) -> None:
        """A deleted queue is unknown: no settings, counters, records or results of it are left (laws 1, 7)."""
        await bench.configure(max_losses=9)
        subscription, delivery = await bench.running("t1")
        await bench.publish("t2")
        await subscription.ack(delivery, results=[b"1"])
        await bench.control.purge(KEY)
        await subscription.close()
        done = await bench.control.delete(KEY)
        assert (done.deleted, done.forgotten) == (True, 2)
        assert KEY not in await bench.control.queues()
        assert await bench.control.ledger(KEY) == Ledger()
        assert await bench.control.settings(KEY) == QueueSettings()
        assert await bench.control.statuses(KEY, "t1", "t2") == (None, None)
        assert await bench.control.results(KEY, "t1") == (None,)
        again = await bench.control.delete(KEY)
        assert (again.deleted, again.forgotten) == (False, 0)

    async def test_a_deleted_queue_can_be_used_again(self, bench: Bench) -> None:
        """After a queue is deleted, its ids can be used again, and its old receipts are stale (laws 2, 4, 7)."""
        subscription, old = await bench.running("t1")
        await subscription.redeliver(old)
        await bench.control.cancel(KEY, "t1")
        await subscription.close()
        assert (await bench.control.delete(KEY)).deleted
        subscription = await bench.subscribed("t1", "t2")
        deliveries = await bench.take(subscription, 2)
        assert ids(deliveries) == ["t1", "t2"]
        await bench.stale(subscription.ack(old))
        assert await subscription.ack(*deliveries) == (Settled.OK, Settled.OK)
        await bench.expect(done=2)

    async def test_delete_what_is_in_use(self, bench: Bench) -> None:
        """A queue with waiting, scheduled or running tasks, or with a subscription, is not deleted (law 1)."""
        await bench.publish("waiting")
        await bench.publish("scheduled", not_before=bench.now + 3600)

        async def refused() -> None:
            before = await bench.control.ledger(KEY)
            with pytest.raises(QueueInUse):
                await bench.control.delete(KEY)
            assert await bench.control.ledger(KEY) == before

        await refused()
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        await refused()
        await bench.control.cancel(KEY, "scheduled")
        await refused()
        await subscription.ack(delivery)
        await refused()
        await subscription.close()
        assert (await bench.control.delete(KEY)).deleted

    @needs(Capability.AFTER)
    async def test_delete_with_blocked_tasks(self, bench: Bench) -> None:
        """A queue with blocked tasks is not deleted (law 1)."""
        await bench.publish("parent", key=OTHER)
        await bench.publish("child", after=after("parent", key=OTHER))
        with pytest.raises(QueueInUse, match="blocked"):
            await bench.control.delete(KEY)
        await bench.control.cancel(KEY, "child")
        assert (await bench.control.delete(KEY)).deleted

    @needs(Capability.UNIQUE)
    async def test_a_deleted_queue_has_no_keys(self, bench: Bench) -> None:
        """The deletion of a queue deletes its keys (U12)."""
        unique = UniqueKey(key="k", period=1000)
        subscription, delivery = await bench.running("t1", unique=unique)
        await subscription.ack(delivery)
        await subscription.close()
        assert await bench.statuses(bench.task("t2", unique=unique)) == [Published.DUPLICATE]
        await bench.control.delete(KEY)
        await bench.publish("t2", unique=unique)
