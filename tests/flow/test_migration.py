"""Blue/green migration: which of the two backends gets the tasks, settings and settlements during a migration (A20)."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import LeaseLost
from taskqueue_core.migration import (
    MigrationPhase,
    finish,
    rollback,
    start,
    status,
)
from taskqueue_core.migration.steps import MigrationUnfinished
from taskqueue_core.tasks import Published, Refusal, Settled, Task
from tests.flow.pairs import ACCEPTED, DUPLICATE, KEY, REFUSED, pair, take

pytestmark = pytest.mark.fast_clock


async def test_from_one_side_to_the_other() -> None:
    """A20, fault J1: old tasks run from the old backend, new ones go to the new one; then the migration can finish."""
    async with pair() as two:
        assert await two.publish("a", "b") == [ACCEPTED] * 2
        assert (await status(two.both)).phase is MigrationPhase.IDLE
        started = await start(two.both)
        assert (started.phase, started.leaves, started.unfinished) == (
            MigrationPhase.STARTED,
            "old",
            (KEY,),
        )
        assert await two.publish("c", "d") == [ACCEPTED] * 2
        assert await two.where("a", "b", "c", "d") == ["o", "o", "n", "n"]
        with pytest.raises(MigrationUnfinished, match=KEY):
            await finish(two.both)
        async with two.both.subscribe([KEY], "worker") as subscription:
            taken = await take(subscription, 4)
            assert sorted(one.task.id for one in taken) == ["a", "b", "c", "d"]
            assert await subscription.ack(*taken) == (Settled.OK,) * 4
        for side in (two.old, two.new):
            assert (await side.control.ledger(KEY)).done == 2
        assert (await two.both.control.ledger(KEY)).published == 4
        done = await finish(two.both)
        assert (done.phase, done.unfinished, done.remembered) == (MigrationPhase.FINISHED, (), 300)


async def test_one_copy_of_an_id() -> None:
    """Fault J7: repeating a publish in any process, before, during or after the migration, stores one copy (law 7)."""
    async with pair() as two:
        await two.publish("a")
        before = two.open()
        await two.publish("x", through=before)
        await start(two.both)
        assert await two.publish("a", "b", "a", "b") == [DUPLICATE, ACCEPTED, DUPLICATE, DUPLICATE]
        assert await two.publish("a", "b", through=before) == [DUPLICATE] * 2
        (told,) = await two.both.publisher.publish(Task(key=KEY, id="a", payload=b"1"))
        assert told.status is Published.CONFLICT
        late = two.open()
        await two.publish("y", through=late)
        await rollback(two.both)
        for through in (two.both, before, late, two.open()):
            assert await two.publish("a", "b", "x", "y", through=through) == [DUPLICATE] * 4
        assert await two.where("a", "b", "x", "y") == ["o", "n", "o", "n"]
        assert await two.publish("c", through=late) == [ACCEPTED]
        assert await two.where("c") == ["o"]


async def test_forgotten_ids_are_free() -> None:
    """Law 7: an id is free again once its window has passed, even if the old backend still keeps the result."""
    async with pair() as two:
        await two.publish("a")
        async with two.both.subscribe([KEY], "worker") as subscription:
            await subscription.ack(*await take(subscription, 1), results=[b"1"])
        await start(two.both)
        assert await two.publish("a") == [DUPLICATE]
        await two.clock.advance(302)
        assert await two.both.control.results(KEY, "a") == (b"1",)
        assert await two.publish("a") == [ACCEPTED]
        assert await two.where("a") == ["on"]
        assert await two.both.control.results(KEY, "a") == (None,)


async def test_a_publisher_of_yesterday() -> None:
    """Fault J5: a publisher that knows only the old backend is refused; tasks it stored before the start still run."""
    async with pair() as two:
        await two.publish("a")
        await start(two.both)
        (told,) = await two.old.publisher.publish(Task(key=KEY, id="b"))
        assert (told.status, told.code, told.retry_after) == (REFUSED, Refusal.MOVED, None)
        assert await two.publish("a", through=two.old) == [DUPLICATE]
        unseen = Task(key="unseen", id="c")  # this queue did not exist when the migration started
        (told,) = await two.old.publisher.publish(unseen)
        assert told.status is ACCEPTED
        assert (await status(two.both)).open_queues == ("unseen",)
        await two.both.control.maintain()
        (told,) = await two.old.publisher.publish(Task(key="unseen", id="d"))
        assert told.code is Refusal.MOVED
        (told,) = await two.both.publisher.publish(unseen)
        assert told.status is DUPLICATE
        async with two.both.subscribe(["unseen"], "worker") as subscription:
            assert (await take(subscription, 1))[0].task == unseen


async def test_a_queue_first_used_meanwhile() -> None:
    """Fault J5: if a queue is first used during a migration, the old backend refuses it before the new one opens."""
    async with pair() as two:
        await start(two.both)
        assert await two.publish("a") == [ACCEPTED]
        assert await two.where("a") == ["n"]
        assert await two.publish("a", "b", through=two.old) == [REFUSED] * 2


async def test_receipts_never_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault J3: if both backends issue the same receipt, each settlement still ends the right delivery."""
    monkeypatch.setattr("secrets.token_hex", lambda _=None: "same")
    monkeypatch.setattr("secrets.token_urlsafe", lambda _=None: "same")
    async with pair() as two:
        await two.publish("a")
        await start(two.both)
        await two.publish("b")
        async with two.both.subscribe([KEY], "worker") as subscription:
            taken = {one.task.id: one for one in await take(subscription, 2)}
            inner = [two.both.to_member(taken[name])[1].receipt for name in ("a", "b")]
            assert inner[0] == inner[1]
            assert taken["a"].receipt != taken["b"].receipt
            await subscription.ack(taken["a"])
            assert (await two.old.control.ledger(KEY)).done == 1
            assert (await two.new.control.ledger(KEY)).in_flight == 1
            assert await two.both.control.progress(taken["b"], 0.5)
            with pytest.raises(LeaseLost):
                await subscription.redeliver(taken["a"])
            assert await subscription.redeliver(taken["a"], taken["b"]) == (
                Settled.LEASE_LOST,
                Settled.OK,
            )


async def test_each_verb_at_its_origin() -> None:
    """A20: retries, dead-lettering, hand-overs and revocations go to the backend that has the task."""
    async with pair() as two:
        await two.publish("a", "b", "c", "d")
        await start(two.both)
        one, other = (two.both.subscribe([KEY], "worker") for _ in range(2))
        taken = {delivery.task.id: delivery for delivery in await take(one, 4)}
        publisher, control = two.both.publisher, two.both.control
        await publisher.schedule_retry(taken["a"].task, two.clock.now(), settles=taken["a"])
        assert await one.dead_letter(taken["b"], "bad") is Settled.OK
        (adopted,) = await other.adopt(taken["c"].receipt)
        assert adopted is not None
        assert adopted.receipt == taken["c"].receipt
        lost = asyncio.create_task(one.revoked())
        assert await control.cancel(KEY, "d")
        assert await lost == (taken["d"].receipt,)
        assert await other.ack(adopted) == (Settled.OK,)
        ledger = await two.old.control.ledger(KEY)
        counts = ledger.scheduled + ledger.waiting, ledger.dead, ledger.done, ledger.cancelled
        assert counts == (1, 1, 1, 1)
        assert [letter.task.id for letter in await two.both.dead_letters.list(KEY)] == ["b"]
        assert await two.both.dead_letters.redrive(KEY) == 1
        assert sorted(delivery.attempt for delivery in await take(other, 2)) == [1, 2]
        await publisher.schedule_retry(taken["c"].task, two.clock.now(), token="again")
        assert await two.where("a", "b", "c", "d") == ["o"] * 4
        for subscription in (one, other):
            await subscription.close()


async def test_a_worker_that_was_there_before() -> None:
    """A20: a delivery made before the migration is adopted with the receipt that its worker already has."""
    async with pair() as two:
        await two.publish("a")
        before = two.old.subscribe([KEY], "worker")
        (delivery,) = await take(before, 1)
        await start(two.both)
        async with two.both.subscribe([KEY], "worker") as subscription:
            (adopted,) = await subscription.adopt(delivery.receipt)
            assert adopted == delivery
            assert await subscription.ack(adopted) == (Settled.OK,)
            assert await subscription.adopt("unknown") == (None,)


async def test_dead_letters_of_both() -> None:
    """A20: dead letters of both backends are listed page by page, the old backend's first, and are not moved."""
    async with pair() as two:
        async with two.both.subscribe([KEY], "worker") as subscription:
            for number in range(6):
                if number == 3:
                    await start(two.both)
                await two.publish(f"t{number}")
                await subscription.dead_letter((await take(subscription, 1))[0], "bad")
        seen: list[str] = []
        while page := await two.both.dead_letters.list(
            KEY, limit=2, after=seen[-1] if seen else None
        ):
            seen += [letter.task.id for letter in page]
        assert seen == [f"t{number}" for number in range(6)]
        assert (await status(two.both)).unfinished == (KEY,)
        assert await two.both.dead_letters.discard(KEY, "t0", "t5") == 2
        assert (await finish(two.both, force=True)).phase is MigrationPhase.FINISHED


async def test_settings_move_and_hold_on_both_sides() -> None:
    """A20: start copies settings that the new backend lacks; later changes and pauses apply to both (laws 5, 9)."""
    async with pair() as two:
        await two.old.control.configure(KEY, QueueSettings(max_losses=1, capacity=9))
        await two.old.control.configure("other", QueueSettings(max_losses=2))
        await two.new.control.configure("other", QueueSettings(max_losses=3))
        await two.publish("a")
        await start(two.both)
        control = two.both.control
        found = await control.settings(KEY)
        assert (found.max_losses, found.capacity, found.moved_to) == (1, 9, None)
        assert (await control.settings("other")).max_losses == 3
        await control.configure(KEY, found.model_copy(update={"paused": True}))
        await two.publish("b")
        for side in (two.old, two.new, two.both):
            subscription = side.subscribe([KEY], "worker")
            assert not (await subscription.receive(5, 0)).deliveries
            await subscription.close()
        await rollback(two.both)
        found = await control.settings(KEY)
        assert (found.max_losses, found.paused, found.moved_to) == (1, True, None)


async def test_copies_move() -> None:
    """D9, fault J7: a task that the old backend copied to bound queues is not copied again by the new one (law 7)."""
    async with pair() as two:
        await two.both.control.configure(KEY, QueueSettings(bound_to=("a", "b")))
        await two.publish("x")
        await start(two.both)
        assert await two.publish("x", through=two.open()) == [DUPLICATE]
        assert await two.publish("y") == [ACCEPTED]
        assert await two.publish("x", "y") == [DUPLICATE] * 2
        for key in ("a", "b"):
            ledgers = [await side.control.ledger(key) for side in (two.old, two.new)]
            assert [one.waiting for one in ledgers] == [1, 1]
