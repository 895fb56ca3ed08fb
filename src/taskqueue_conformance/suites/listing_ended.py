"""Lists of ended tasks, the settings that keep them, and what the store knows of one task."""

from __future__ import annotations

import pytest

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.listing import NAMES, shows, summaries, walk
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import listing_of
from taskqueue_core.tasks import Published, State

_DAY = 86_400.0


async def _end(bench: Bench, *names: str) -> None:
    """Publish tasks, and end one after another as done."""
    subscription = await bench.subscribed(*names)
    for name in names:
        delivery = await bench.one(subscription)
        assert delivery.task.id == name
        await subscription.ack(delivery, results=[b'"kept"'])
    await subscription.close()


async def _forget(bench: Bench) -> None:
    await bench.advance(2 * bench.short)
    for _ in range(3):
        await bench.control.maintain()


class ListingEndedSuite(Harness, needs=(Capability.LISTING,)):
    """Tests of lists of tasks that have ended."""

    async def test_list_of_done_tasks(self, bench: Bench) -> None:
        """Done tasks are listed in the order of their ends (U18)."""
        subscription, *running = await bench.all_running(*NAMES)
        order = [running[place] for place in (3, 0, 6, 1, 2, 5, 4)]
        for delivery in order:
            await subscription.ack(delivery)
        await shows(bench, ids(order), State.DONE)
        assert await walk(bench, State.IN_FLIGHT) == []

    @needs(Capability.CONTROL)
    async def test_list_of_each_end(self, bench: Bench) -> None:
        """Each end has a list of its own; a cancelled task leaves the list that it was on (U18)."""
        await bench.publish("expires", deadline=bench.now + bench.short)
        await bench.publish("done", "cancelled")
        assert await bench.control.cancel(KEY, "cancelled")
        await bench.advance(2 * bench.short)
        subscription = bench.subscribe()
        (delivery,) = await bench.eventually(subscription, 1)
        await subscription.ack(delivery)
        for name in ("expired", "done", "cancelled"):
            listed = await walk(bench, State(name))
            assert listed == [name.replace("expired", "expires")]
        assert await walk(bench) == []

    @needs(Capability.DEAD_LETTERS)
    async def test_list_of_discarded_tasks(self, bench: Bench) -> None:
        """A discarded dead letter leaves the list of dead tasks for that of discarded ones (U18)."""
        subscription, *running = await bench.all_running("t0", "t1", "t2")
        for delivery in running:
            await bench.bury(subscription, delivery)
        await bench.dead_letters.discard(KEY, "t1", "t0")
        await shows(bench, ["t2"], State.DEAD)
        assert sorted(await walk(bench, State.DISCARDED)) == ["t0", "t1"]

    @needs(Capability.CONTROL)
    async def test_ended_tasks_are_forgotten(self, bench: Bench) -> None:
        """Without ``keep_ended``, ended tasks leave the lists with their records (U18)."""
        await bench.configure(dedupe_window=bench.short, result_ttl=0)
        await _end(bench, "t0")
        assert await walk(bench, State.DONE) == ["t0"]
        await _forget(bench)
        assert await walk(bench, State.DONE) == []
        assert await listing_of(bench.backend).task(KEY, "t0") is None

    @needs(Capability.CONTROL)
    async def test_kept_tasks(self, bench: Bench) -> None:
        """With ``keep_ended``, they stay with their worker, although their ids may be used again (law 7; U18)."""
        await bench.configure(dedupe_window=bench.short, result_ttl=bench.short, keep_ended=_DAY)
        await _end(bench, "t0", "t1")
        await _forget(bench)
        found = await summaries(bench, State.DONE, worker="worker", limit=1)
        assert [(task.task_id, task.worker_id) for task in found] == [
            ("t0", "worker"),
            ("t1", "worker"),
        ]
        assert await walk(bench, State.DONE, worker="w2") == []
        assert await bench.control.results(KEY, "t0", "t1") == (None, None)
        (answer,) = await bench.offer(bench.task("t0", payload="new"))
        assert answer.status is Published.ACCEPTED, "a kept record is no duplicate (law 7)"
        assert await walk(bench, State.DONE) == ["t1"]
        assert await walk(bench) == ["t0"]
        await bench.expect(done=2, waiting=1)
        delivery = await bench.one(subscription := bench.subscribe())
        assert delivery.task.value() == "new"
        await subscription.ack(delivery)
        await shows(bench, ["t1", "t0"], State.DONE)

    @needs(Capability.CONTROL, Capability.HANDOVER)
    async def test_worker_of_an_adopted_task(self, bench: Bench) -> None:
        """A task that was adopted ends with its worker, although the old subscription is closed (law 2; U18)."""
        await bench.configure(keep_ended=_DAY)
        old, *running = await bench.all_running("t0", "t1")
        new = bench.subscribe()
        await bench.adopt(new, *(delivery.receipt for delivery in running))
        await old.close()
        await new.ack(*running)
        ended = await summaries(bench, State.DONE)
        assert [task.worker_id for task in ended] == ["worker", "worker"]

    @needs(Capability.CONTROL)
    async def test_kept_tasks_have_an_end(self, bench: Bench) -> None:
        """After ``keep_ended`` they are forgotten; a walk over what is left continues where it was (law 11; U18)."""
        await bench.configure(dedupe_window=0, result_ttl=0, keep_ended=4 * bench.short)
        await _end(bench, "t0", "t1")
        await bench.advance(3 * bench.short)
        await _end(bench, "t2", "t3", "t4")
        page = await listing_of(bench.backend).tasks(KEY, state=State.DONE, limit=3)
        await _forget(bench)
        assert await walk(bench, State.DONE, after=page.next) == ["t3", "t4"]
        assert await walk(bench, State.DONE) == ["t2", "t3", "t4"]

    @needs(Capability.CONTROL)
    async def test_the_most_kept_tasks(self, bench: Bench) -> None:
        """Beyond ``keep_ended_most`` the oldest go, but none within the window of duplicates (law 7; U18)."""
        await bench.configure(dedupe_window=_DAY, result_ttl=0, keep_ended=_DAY, keep_ended_most=3)
        await _end(bench, *NAMES[:5])
        await _forget(bench)
        assert await walk(bench, State.DONE) == list(NAMES[:5]), "an id within its window is lost"
        assert await bench.statuses("t0") == [Published.DUPLICATE]

    @needs(Capability.CONTROL)
    @needs("manual_clock")
    async def test_the_oldest_kept_tasks_go(self, bench: Bench) -> None:
        """Maintenance deletes the oldest tasks beyond ``keep_ended_most``, within 15 seconds (U18)."""
        await bench.configure(
            dedupe_window=bench.short, result_ttl=0, keep_ended=_DAY, keep_ended_most=2
        )
        await _end(bench, *NAMES[:4])
        await _forget(bench)
        assert await walk(bench, State.DONE) == ["t2", "t3"]
        await _end(bench, "t4")
        await bench.advance(15)
        await _forget(bench)
        await shows(bench, ["t3", "t4"], State.DONE, limit=1)
        await bench.expect(done=5)

    @needs(Capability.CONTROL)
    async def test_the_most_kept_tasks_of_one_time(self, bench: Bench) -> None:
        """Of tasks that ended together, those beyond ``keep_ended_most`` go when their results expire (U18)."""
        await bench.configure(
            dedupe_window=bench.short,
            result_ttl=3 * bench.short,
            keep_ended=_DAY,
            keep_ended_most=1,
        )
        subscription, *running = await bench.all_running("t0", "t1", "t2")
        await subscription.ack(*running, results=[b"1"] * 3)
        await _forget(bench)
        await _forget(bench)
        first, second, last = await bench.control.statuses(KEY, "t0", "t1", "t2")
        assert (first, second) == (None, None)
        assert last is not None

    @needs("atomic_retry")
    async def test_what_is_known_of_a_task(self, bench: Bench) -> None:
        """The detail of a task has its contents, its times, its worker and its failures (U18)."""
        subscription, delivery = await bench.running("t0", tags=("a",), headers={"h": "1"})
        await bench.retry(delivery.task, settles=delivery, error="first", traceback="trace")
        await bench.advance(bench.short)
        (delivery,) = await bench.eventually(subscription, 1)
        found = await listing_of(bench.backend).task(KEY, "t0")
        assert found is not None
        assert found.task == delivery.task
        assert (found.status.state, found.status.attempt) == (State.IN_FLIGHT, 2)
        assert found.worker_id == "worker"
        (failure,) = found.history
        assert (failure.attempt, failure.error, failure.traceback) == (1, "first", "trace")
        assert failure.worker == "worker"
        assert [task.error for task in await summaries(bench, State.IN_FLIGHT)] == ["first"]
        assert found.published_at is None or found.published_at <= delivery.delivered_at
        assert found.delivered_at in (
            None,
            pytest.approx(delivery.delivered_at, abs=bench.short / 2),
        )
        await subscription.ack(delivery)
        found = await listing_of(bench.backend).task(KEY, "t0")
        assert found is not None
        assert (found.status.state, found.task.id, found.task.tags) == (State.DONE, "t0", ("a",))
