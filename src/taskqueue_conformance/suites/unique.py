"""The capability ``unique``: at most one live task of a queue holds a unique key. A new one is kept out or refused."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_conformance.bench import KEY, OTHER, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.fan_out import bound
from taskqueue_conformance.suites.helpers import ack, bury, cancel, expire, lose
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.tasks import Confirmation, Ledger, Published, Refusal, State
from taskqueue_core.uniqueness import UniqueKey

_KEPT = Published.DUPLICATE


class UniqueSuite(Harness, needs=(Capability.UNIQUE,)):
    """Tests of `UniqueKey` with ``keep`` and ``refuse``."""

    async def test_unique_keeps_a_second_task_out(self, bench: Bench) -> None:
        """A task whose key is held is not stored; the answer names the holder (law 7; U12)."""
        await bench.publish("t1", unique=key())
        check_kept(await offer(bench, "t2"), by="t1")
        await bench.publish("t3", unique=key("another"))
        await bench.publish("t4")
        await bench.publish("t5", unique=key(), key=OTHER)
        await bench.expect(published=3, waiting=3)
        assert ids(await bench.take(bench.subscribe(), 9)) == ["t1", "t3", "t4"]

    async def test_unique_refuses_a_second_task(self, bench: Bench) -> None:
        """With ``refuse``, a task whose key is held is refused; a retry makes no sense (law 6; U12)."""
        await bench.publish("t1", unique=key())
        answer = await offer(bench, "t2", on_conflict="refuse")
        assert (answer.status, answer.code) == (Published.REFUSED, Refusal.NOT_UNIQUE)
        assert answer.existing_id == "t1"
        assert answer.reason, "refused without a reason (law 6)"
        assert "t1" in answer.reason
        assert answer.retry_after is None
        assert not answer.stored
        await bench.expect(published=1, waiting=1)

    async def test_unique_within_a_batch(self, bench: Bench) -> None:
        """Tasks of one batch keep each other out, as those of several batches do (law 7; U12)."""
        tasks = [bench.task(f"t{n}", unique=key(f"k{n % 3}")) for n in range(12)]
        answers = await bench.offer(*tasks)
        stored = [a.task_id for a in answers if a.status is Published.ACCEPTED]
        assert stored == ["t0", "t1", "t2"]
        assert [a.existing_id for a in answers[3:]] == ["t0", "t1", "t2"] * 3
        await bench.expect(published=3, waiting=3)

    async def test_unique_side_by_side(self, bench: Bench) -> None:
        """Of concurrent publishes with one key, exactly one stores its task (laws 7, 10; U12)."""
        answers = await asyncio.gather(*(offer(bench, f"t{n}") for n in range(30)))
        (first,) = (a.task_id for a in answers if a.status is Published.ACCEPTED)
        assert {a.existing_id for a in answers if a.status is _KEPT} == {first}
        await bench.expect(published=1, waiting=1)

    @needs("shared")
    async def test_unique_between_processes(self, bench: Bench) -> None:
        """Two processes that publish with one key store one task (laws 7, 10; U12)."""
        other = await bench.replica()
        answers = await asyncio.gather(
            *(
                offer(at, f"{name}{n}")
                for n in range(10)
                for name, at in (("a", bench), ("b", other))
            )
        )
        assert [a.status for a in answers].count(Published.ACCEPTED) == 1
        await bench.expect(published=1, waiting=1)

    @needs("durable")
    async def test_unique_after_reopening(self, bench: Bench) -> None:
        """A key is held across the end of the process (law 7; U12)."""
        await bench.publish("t1", unique=key())
        bench = await bench.reopen()
        check_kept(await offer(bench, "t2"), by="t1")

    async def test_unique_held_until_the_end(self, bench: Bench) -> None:
        """A task holds its key while it is scheduled, waiting or in flight, and gives it back at its end (U12)."""
        await bench.publish("t1", unique=key(), not_before=bench.now + bench.short)
        check_kept(await offer(bench, "t2"), by="t1")
        await bench.advance(bench.short)
        check_kept(await offer(bench, "t2"), by="t1")
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        check_kept(await offer(bench, "t2"), by="t1")
        await subscription.ack(delivery)
        assert (await offer(bench, "t2")).status is Published.ACCEPTED

    @needs(Capability.CONTROL)
    async def test_unique_every_end_gives_the_key_back(self, bench: Bench) -> None:
        """A task that was cancelled, has expired or is done holds nothing (U12)."""
        for end in (ack, cancel, expire):
            name = end.__name__
            at = bench.now + bench.short if end is expire else None
            subscription, delivery = await bench.running(name, unique=key(name), deadline=at)
            await end(bench, subscription, delivery)
            answer = await offer(bench, f"{name}-2", name)
            assert answer.status is Published.ACCEPTED, f"still held after {name}"
            await bench.control.purge(KEY)
            await subscription.close()

    @needs(Capability.DEAD_LETTERS)
    async def test_unique_dead_letter_holds_nothing(self, bench: Bench) -> None:
        """A dead letter holds no key; its redrive passes the holder, and holds the key as well (U12)."""
        subscription, delivery = await bench.running("t1", unique=key())
        await bury(bench, subscription, delivery)
        await bench.publish("t2", unique=key())
        assert await bench.dead_letters.redrive(KEY, "t1") == 1
        for delivery in sorted(await bench.take(subscription, 9), key=lambda each: each.task.id):
            assert (await offer(bench, "t3")).existing_id in {"t1", "t2"}
            await subscription.ack(delivery)
        assert (await offer(bench, "t3")).status is Published.ACCEPTED

    @needs(Capability.DEAD_LETTERS)
    async def test_unique_redriven_task_takes_the_key_back(self, bench: Bench) -> None:
        """A redriven task holds its key once a newer holder has ended, also if its key was looked up before (U12)."""
        subscription, delivery = await bench.running("t1", unique=key())
        await bury(bench, subscription, delivery)
        await bench.publish("t2", unique=key())
        check_kept(await offer(bench, "t3"), by="t2")
        await bench.dead_letters.redrive(KEY)
        taken = {each.task.id: each for each in await bench.take(subscription, 9)}
        await subscription.ack(taken["t2"])
        check_kept(await offer(bench, "t3"), by="t1")
        await subscription.ack(taken["t1"])
        assert (await offer(bench, "t3")).status is Published.ACCEPTED

    @needs(Capability.DEAD_LETTERS)
    async def test_unique_retry_of_a_dead_letter(self, bench: Bench) -> None:
        """The retry of a dead letter, or of a task that is gone, looks at no key, and its task holds the key (U12)."""
        subscription, delivery = await bench.running("t1", unique=key())
        await bury(bench, subscription, delivery)
        assert await bench.retry(delivery.task) is Published.ACCEPTED
        check_kept(await offer(bench, "t2"), by="t1")
        gone = bench.task("t9", unique=key())
        assert await bench.retry(gone) is Published.ACCEPTED
        assert (await offer(bench, "t2")).existing_id in {"t1", "t9"}

    async def test_unique_retry_never_meets_its_key(self, bench: Bench) -> None:
        """A task that is released, lost or retried holds its key, and comes back (laws 3, 7; U12)."""
        subscription, delivery = await bench.running("t1", unique=key())
        await subscription.redeliver(delivery)
        check_kept(await offer(bench, "t2"), by="t1")
        await lose(bench, subscription, await bench.one(subscription))
        check_kept(await offer(bench, "t2"), by="t1")
        delivery = await bench.one(subscription)
        if bench.backend.capabilities.atomic_retry:
            answer = await bench.retry(delivery.task, bench.short, settles=delivery)
            assert answer is Published.ACCEPTED
            check_kept(await offer(bench, "t2"), by="t1")
            await bench.advance(bench.short)
            delivery = await bench.one(subscription)
            assert delivery.attempt == 2
        await subscription.ack(delivery)
        assert (await offer(bench, "t2")).status is Published.ACCEPTED

    async def test_unique_until_started(self, bench: Bench) -> None:
        """With ``started``, a task holds its key until it is delivered, and not after a release (U12)."""
        await bench.publish("t1", unique=key(until="started"))
        check_kept(await offer(bench, "t2", until="started"), by="t1")
        subscription = bench.subscribe()
        first = await bench.one(subscription)
        await bench.publish("t2", unique=key(until="started"))
        await subscription.redeliver(first)
        check_kept(await offer(bench, "t3", until="started"), by="t2")
        assert ids(await bench.take(subscription, 9)) == ["t1", "t2"]
        await bench.publish("t3", unique=key(until="started"))

    async def test_unique_period(self, bench: Bench) -> None:
        """With a period, a task holds its key for so long after its publish, also after its end (U12)."""
        await bench.publish("t1", unique=key(period=4 * bench.short))
        subscription = bench.subscribe()
        await subscription.ack(await bench.one(subscription))
        check_kept(await offer(bench, "t2", period=4 * bench.short), by="t1")
        await bench.advance(3 * bench.short)
        check_kept(await offer(bench, "t2"), by="t1")
        await bench.advance(bench.short)
        assert (await offer(bench, "t2")).status is Published.ACCEPTED

    @needs(Capability.CONTROL)
    async def test_unique_period_longer_than_the_memory(self, bench: Bench) -> None:
        """A period is kept although the deduplication window has passed; the id can be used again (law 7; U12)."""
        await bench.configure(dedupe_window=bench.short)
        await bench.publish("t1", unique=key(period=9 * bench.short))
        subscription = bench.subscribe()
        await subscription.ack(await bench.one(subscription))
        for _ in range(4):
            await bench.advance(bench.short)
            await bench.control.maintain()
        check_kept(await offer(bench, "t2"), by="t1")
        check_kept(await offer(bench, "t1", payload="other"), by="t1")
        await bench.publish("t1", payload="other")
        await bench.expect(published=2, done=1, waiting=1)

    async def test_unique_id_comes_first(self, bench: Bench) -> None:
        """The id is looked up before the key: a repetition is a duplicate, another payload a conflict (law 7; U12)."""
        await bench.publish("t1", unique=key("a"))
        await bench.publish("t2", unique=key("b"))
        (again,) = await bench.offer(bench.task("t2", unique=key("a", on_conflict="refuse")))
        assert (again.status, again.existing_id) == (_KEPT, None)
        other = bench.task("t2", payload="other", unique=key("a"))
        assert await bench.statuses(other) == [Published.CONFLICT]
        await bench.expect(published=2, waiting=2)

    @needs(Capability.CONTROL, Capability.FLOW)
    async def test_unique_takes_no_room(self, bench: Bench) -> None:
        """A task that is kept out is not refused for lack of room, nor while the intake is paused (law 6; U12)."""
        await bench.limit(capacity=1)
        await bench.publish("t1", unique=key())
        check_kept(await offer(bench, "t2"), by="t1")
        assert (await offer(bench, "t2", "other")).code is Refusal.QUEUE_FULL
        answer = await offer(bench, "t2", on_conflict="refuse")
        assert answer.code is Refusal.NOT_UNIQUE
        await bench.limit(intake_paused=True)
        check_kept(await offer(bench, "t2"), by="t1")
        assert (await offer(bench, "t2", on_conflict="replace")).status is Published.REPLACED
        await bench.expect(published=1, waiting=1)

    @needs(Capability.CONTROL, "stored")
    async def test_unique_ended_keys_are_forgotten(self, bench: Bench) -> None:
        """Keys of ended tasks leave nothing behind, even if they are never looked up again (U12)."""
        await bench.configure(dedupe_window=bench.short)
        await _one_by_one(bench, 1, "first")
        before = await bench.harness.stored(bench.backend)
        await _one_by_one(bench, 20, "next")
        assert await bench.harness.stored(bench.backend) == before

    @needs(Capability.CONTROL)
    async def test_unique_purged_tasks_hold_nothing(self, bench: Bench) -> None:
        """A purge gives the keys of its tasks back (U12)."""
        await bench.publish("t1", unique=key("a"))
        await bench.publish("t2", unique=key("b"), not_before=bench.now + 100)
        assert await bench.control.purge(KEY) == 2
        await bench.publish("t3", unique=key("a"))
        await bench.publish("t4", unique=key("b"))

    @needs(Capability.FAN_OUT, Capability.CONTROL)
    async def test_unique_each_queue_of_a_fan_out_decides(self, bench: Bench) -> None:
        """With ``bound_to``, each queue decides for itself; ``accepted`` if one of them stored a copy (D9; U12)."""
        one, two = await bound(bench, 2)
        await bench.publish("t1", unique=key(), key=one)
        assert (await offer(bench, "t2")).status is Published.ACCEPTED
        assert await bench.control.ledger(one) == Ledger(published=1, waiting=1)
        assert await bench.state("t2", one) is None
        assert await bench.state("t2", two) is State.WAITING
        answer = await offer(bench, "t3")
        assert (answer.key, answer.status) == (KEY, _KEPT)
        assert answer.existing_id in {"t1", "t2"}
        assert (await offer(bench, "t3", on_conflict="refuse")).code is Refusal.NOT_UNIQUE
        assert (await offer(bench, "t4", on_conflict="replace")).status is Published.REPLACED
        for name in (one, two):
            assert await bench.control.ledger(name) == Ledger(published=1, waiting=1)
            (delivery,) = await bench.take(bench.subscribe(name), 9)
            assert delivery.task.value() == "t4"
        if has(bench.backend, Capability.FLOW):
            await bench.limit(two, capacity=1)
            await bench.publish("full", key=two)
            assert (await offer(bench, "t5", "fresh")).code is Refusal.QUEUE_FULL
            assert await bench.state("t5", one) is None


async def _one_by_one(bench: Bench, number: int, name: str) -> None:
    """Publish and end tasks, each with its own key, and let the store forget them."""
    subscription = bench.subscribe()
    for n in range(number):
        await bench.publish(f"{name}{n}", unique=key(f"{name}{n}", period=bench.short))
        again = await offer(bench, f"{name}{n}-again", f"{name}{n}", on_conflict="replace")
        assert again.status is Published.REPLACED
        await subscription.ack(await bench.one(subscription))
    await subscription.close()
    for _ in range(3):
        await bench.advance(2 * bench.short)
        await bench.control.maintain()


def key(name: str = "k", **fields: Any) -> UniqueKey:
    """Return a unique key."""
    return UniqueKey(key=name, **fields)


async def offer(
    bench: Bench, task_id: str, name: str = "k", *, payload: object = None, **fields: Any
) -> Confirmation:
    """Publish a task with a unique key to `KEY`. ``fields`` are those of its `UniqueKey`."""
    task = bench.task(task_id, payload=payload or task_id, unique=key(name, **fields))
    (answer,) = await bench.offer(task)
    assert (answer.key, answer.task_id) == (KEY, task_id)
    return answer


def check_kept(answer: Confirmation, *, by: str) -> None:
    """Fail unless a task was kept out by the holder of its key."""
    assert answer.status is _KEPT, f"the key is held (law 7): {answer}"
    assert answer.existing_id == by, f"the answer must name the holder {by!r}: {answer}"
    assert answer.stored
