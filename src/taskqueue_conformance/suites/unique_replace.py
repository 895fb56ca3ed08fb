"""The capability ``unique`` with ``replace`` and a debounce: the holder of the key gets new contents."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.unique import check_kept, key
from taskqueue_core.backend import Capability
from taskqueue_core.tasks import Confirmation, Published, State
from taskqueue_core.uniqueness import Debounce

_REPLACED = Published.REPLACED


class UniqueReplaceSuite(Harness, needs=(Capability.UNIQUE,)):
    """Tests of `UniqueKey` with ``replace``."""

    async def test_replace_contents(self, bench: Bench) -> None:
        """A replaced task keeps its id, and has the other fields of the new one; the ledger does not change (U12)."""
        await bench.publish("t1", unique=key(), headers={"a": "1"}, priority=3, max_attempts=2)
        answer = await replace(bench, "t2", headers={"b": "2"}, priority=7, max_attempts=9)
        assert (answer.status, answer.existing_id) == (_REPLACED, "t1")
        assert answer.stored
        await bench.expect(published=1, waiting=1)
        (delivery,) = await bench.take(bench.subscribe(), 9)
        task = delivery.task
        assert (task.id, task.value(), task.headers) == ("t1", "t2", {"b": "2"})
        assert (task.priority, task.max_attempts, delivery.attempt) == (7, 9, 1)
        await bench.expect(published=1, in_flight=1)

    async def test_replace_largest_contents(self, bench: Bench) -> None:
        """Small and large contents replace each other, and arrive unchanged (U12)."""
        await bench.publish("t1", unique=key())
        subscription = bench.subscribe()
        for number, size in enumerate((250_000, 1, 5_000)):
            text = "x" * size
            assert (await replace(bench, f"r{number}", payload=text)).status is _REPLACED
        delivery = await bench.one(subscription)
        assert delivery.task.value() == "x" * 5_000
        await subscription.redeliver(delivery)
        delivery = await bench.one(subscription)
        assert delivery.task.value() == "x" * 5_000
        await subscription.ack(delivery)

    @needs(Capability.CONTROL)
    async def test_replace_repetition(self, bench: Bench) -> None:
        """A publish that replaced, repeated, answers ``replaced`` again and changes nothing (law 7; U12)."""
        await bench.publish("t1", unique=key())
        await replace(bench, "t2")
        await replace(bench, "t3")
        again = await replace(bench, "t2")
        assert (again.status, again.existing_id) == (_REPLACED, "t1")
        other = bench.task("t2", payload="other", unique=key())
        (conflict,) = await bench.offer(other)
        assert (conflict.status, conflict.existing_id) == (Published.CONFLICT, None)
        assert await bench.statuses(bench.task("t1", unique=key())) == [Published.DUPLICATE]
        assert await bench.state("t2") is None, "a publish that replaced is no task"
        assert not await bench.control.cancel(KEY, "t2")
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        assert delivery.task.value() == "t3"
        await subscription.ack(delivery)
        assert (await replace(bench, "t3")).status is _REPLACED, "the id is remembered"
        await bench.expect(published=1, done=1)

    @needs(Capability.CONTROL)
    async def test_replace_repetition_after_the_window(self, bench: Bench) -> None:
        """The id of a publish that replaced is remembered for the deduplication window, and no longer (law 7; U12)."""
        await bench.configure(dedupe_window=bench.short)
        await bench.publish("t1", unique=key(), not_before=bench.now + 100)
        await replace(bench, "t2", not_before=bench.now + 100)
        await bench.advance(1.5 * bench.short)
        await bench.control.maintain()
        assert (await replace(bench, "t2")).status is _REPLACED, "again of the task that waits"
        assert (await bench.one(bench.subscribe())).task.value() == "t2"
        await bench.advance(1.5 * bench.short)
        await bench.publish("t2")
        await bench.expect(published=2, waiting=1, in_flight=1)

    async def test_replace_keeps_its_place(self, bench: Bench) -> None:
        """A waiting task that is replaced is not delivered after those that came after it (law 4; U12)."""
        await bench.publish("t1")
        await bench.publish("t2", unique=key())
        await bench.publish("t3")
        for number in range(3):
            await replace(bench, f"r{number}")
        taken = ids(await bench.take(bench.subscribe(), 9))
        assert sorted(taken) == ["t1", "t2", "t3"]
        assert taken.index("t2") < taken.index("t3"), f"it lost its place: {taken} (law 4)"

    async def test_replace_time(self, bench: Bench) -> None:
        """The time of the new task counts: a scheduled task may come at once, a waiting one later (law 8; U12)."""
        await bench.publish("t1", unique=key(), not_before=bench.now + 100)
        await replace(bench, "r1")
        await bench.expect(published=1, waiting=1)
        await replace(bench, "r2", not_before=bench.now + 2 * bench.short)
        await bench.expect(published=1, scheduled=1)
        await replace(bench, "r3", not_before=bench.now + bench.short)
        subscription = bench.subscribe()
        assert await bench.take(subscription) == [], "delivered before its time (law 8)"
        await bench.advance(bench.short)
        delivery = await bench.one(subscription)
        assert (delivery.task.id, delivery.task.value()) == ("t1", "r3")
        assert await bench.take(subscription) == []

    async def test_replace_wakes(self, bench: Bench) -> None:
        """A scheduled task that is replaced by one without a time wakes a waiting receive (U12)."""
        await bench.publish("t1", unique=key(), not_before=bench.now + 100)
        receive = bench.subscribe().receive(1, None)
        assert await bench.wakes(receive, replace(bench, "t2")) == ["t1"]

    async def test_replace_running_task_is_left_alone(self, bench: Bench) -> None:
        """If the holder was delivered, the new task is stored as well; the next one replaces that one (U12)."""
        subscription, first = await bench.running("t1", unique=key())
        assert (await replace(bench, "t2")).status is Published.ACCEPTED
        answer = await replace(bench, "t3")
        assert (answer.status, answer.existing_id) == (_REPLACED, "t2")
        await bench.expect(published=2, in_flight=1, waiting=1)
        await subscription.redeliver(first)
        assert (await replace(bench, "t4")).existing_id == "t2", "a released task is not replaced"
        taken = await bench.take(subscription, 9)
        assert [(each.task.id, each.task.value()) for each in taken] == [("t1", "t1"), ("t2", "t4")]
        await subscription.ack(*taken)
        assert (await replace(bench, "t5")).status is Published.ACCEPTED

    async def test_replace_retried_task_is_left_alone(self, bench: Bench) -> None:
        """A task that waits for a retry was delivered, so it is not replaced, and comes back (laws 3, 7; U12)."""
        if not bench.backend.capabilities.atomic_retry:
            return
        subscription, delivery = await bench.running("t1", unique=key())
        await bench.retry(delivery.task, bench.short, settles=delivery)
        assert (await replace(bench, "t2")).status is Published.ACCEPTED
        await bench.advance(bench.short)
        assert sorted(ids(await bench.take(subscription, 9))) == ["t1", "t2"]

    async def test_replace_within_a_batch(self, bench: Bench) -> None:
        """Tasks of one batch replace each other: the last one wins (law 7; U12)."""
        tasks = [bench.task(f"t{n}", unique=key(on_conflict="replace")) for n in range(4)]
        answers = await bench.offer(bench.task("before"), *tasks, bench.task("t0"), "after")
        assert [a.status for a in answers] == [
            Published.ACCEPTED, Published.ACCEPTED, _REPLACED, _REPLACED, _REPLACED, Published.DUPLICATE,
            Published.ACCEPTED,
        ]  # fmt: skip
        await bench.expect(published=3, waiting=3)
        taken = await bench.take(bench.subscribe(), 9)
        assert sorted((each.task.id, each.task.value()) for each in taken) == [
            ("after", "after"), ("before", "before"), ("t0", "t3"),
        ]  # fmt: skip

    async def test_replace_side_by_side(self, bench: Bench) -> None:
        """Concurrent publishes store one task, which has the contents of one of them (laws 1, 10; U12)."""
        answers = await asyncio.gather(*(replace(bench, f"t{n}") for n in range(30)))
        (first,) = (a.task_id for a in answers if a.status is Published.ACCEPTED)
        assert {a.existing_id for a in answers if a.status is _REPLACED} == {first}
        await bench.expect(published=1, waiting=1)
        (delivery,) = await bench.take(bench.subscribe(), 9)
        assert delivery.task.id == first

    @needs(Capability.CONTROL)
    async def test_replace_deadline(self, bench: Bench) -> None:
        """The deadline of the new task counts, and not the one before (U12)."""
        await bench.publish("t1", unique=key(), deadline=bench.now + bench.short)
        await replace(bench, "r1")
        await bench.advance(2 * bench.short)
        await bench.control.maintain()
        assert await bench.state("t1") is State.WAITING
        await replace(bench, "r2", deadline=bench.now + bench.short)
        await bench.advance(2 * bench.short)
        await bench.control.maintain()
        assert await bench.state("t1") is State.EXPIRED
        await bench.publish("t2", unique=key())

    @needs(Capability.ORDERING_KEYS)
    async def test_replace_ordering_key(self, bench: Bench) -> None:
        """The ordering key of the new task counts; a key that it no longer has, the next task gets (laws 4, 5; U12)."""
        await bench.publish("a1", unique=key(), ordering_key="a")
        await bench.publish("a2", ordering_key="a")
        await bench.publish("b1", ordering_key="b")
        assert (await replace(bench, "r1", ordering_key="a")).status is _REPLACED
        subscription = bench.subscribe()
        first = await bench.take(subscription, 9)
        assert sorted(ids(first)) == ["a1", "b1"]
        await subscription.redeliver(*first)
        await bench.publish("c1", unique=key("c"), ordering_key="c")
        await bench.publish("c2", ordering_key="c")
        task = bench.task("r2", unique=key("c", on_conflict="replace"), ordering_key="b")
        assert await bench.statuses(task) == [_REPLACED]
        taken = await bench.take(subscription, 9)
        assert sorted(ids(taken)) == ["a1", "b1", "c2"]
        await subscription.ack(*taken)
        taken = await bench.take(subscription, 9)
        assert sorted(ids(taken)) == ["a2", "c1"]
        assert {each.task.ordering_key for each in taken} == {"a", "b"}
        await subscription.ack(*taken)
        await bench.expect(published=5, done=5)

    @needs(Capability.ORDERING_KEYS)
    async def test_replace_ordering_key_while_scheduled(self, bench: Bench) -> None:
        """A replaced task that is put off gives its ordering key back (laws 4, 5; U12)."""
        await bench.publish("a1", unique=key(), ordering_key="a")
        await bench.publish("a2", ordering_key="a")
        await replace(bench, "r1", ordering_key="a", not_before=bench.now + bench.short)
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        assert delivery.task.id == "a2"
        await bench.advance(bench.short)
        assert await bench.take(subscription) == []
        await subscription.ack(delivery)
        assert (await bench.one(subscription)).task.value() == "r1"

    @needs(Capability.CONTROL, Capability.FLOW)
    async def test_replace_room(self, bench: Bench) -> None:
        """A replacement takes no room and frees none, whatever the states before and after it are (law 6; U12)."""
        await bench.limit(capacity=2)
        await bench.publish("t1", unique=key())
        await bench.publish("t2")
        for at in (bench.now + 100, bench.now + 100, None, None):
            assert (await replace(bench, f"r{at}", not_before=at)).status is _REPLACED
            assert await bench.statuses("t3") == [Published.REFUSED]
        subscription = bench.subscribe()
        assert len(await bench.take(subscription, 9)) == 2
        await bench.publish("t3", "t4")
        assert await bench.statuses("t5") == [Published.REFUSED]

    @needs(Capability.FAIR_ORDER, Capability.CONTROL)
    async def test_replace_tenant(self, bench: Bench) -> None:
        """A replaced task counts for the tenant of the new one (laws 4, 5; U12)."""
        await bench.fair(tenant_capacity=1)
        await bench.publish("a1", unique=key("a"), tenant="a")
        await bench.publish("b1", unique=key("b"), tenant="b")
        task = bench.task("r1", unique=key("a", on_conflict="replace"), tenant="c")
        assert await bench.statuses(task) == [_REPLACED]
        await bench.publish("a2", tenant="a")
        refused = bench.task("c2", tenant="c")
        assert await bench.statuses(refused) == [Published.REFUSED]
        subscription = bench.subscribe()
        taken = {each.task.id: each.task.tenant for each in await bench.take(subscription, 9)}
        assert taken == {"a1": "c", "b1": "b", "a2": "a"}
        await bench.publish("c2", tenant="c")

    async def test_replace_period(self, bench: Bench) -> None:
        """In its period, a task is replaced until it is delivered; then a new one is kept out (U12)."""
        period = 4 * bench.short
        await bench.publish("t1", unique=key(period=period))
        await bench.advance(bench.short)
        assert (await replace(bench, "r1", unique={"period": period})).status is _REPLACED
        subscription = bench.subscribe()
        delivery = await bench.one(subscription)
        assert delivery.task.value() == "r1"
        check_kept(await replace(bench, "t2", unique={"period": period}), by="t1")
        await subscription.ack(delivery)
        check_kept(await replace(bench, "t2", unique={"period": period}), by="t1")
        await bench.advance(3 * bench.short)
        assert (await replace(bench, "t2")).status is Published.ACCEPTED

    async def test_debounce(self, bench: Bench) -> None:
        """A debounced task comes ``seconds`` after the last publish, with the contents of the last one (law 8; U12)."""
        wait = Debounce(seconds=2 * bench.short)
        assert (await debounce(bench, "t0", wait)).status is Published.ACCEPTED
        await bench.expect(published=1, scheduled=1)
        subscription = bench.subscribe()
        for number in range(1, 4):
            await bench.advance(bench.short)
            assert (await debounce(bench, f"t{number}", wait)).status is _REPLACED
        await bench.advance(1.5 * bench.short)
        assert await bench.take(subscription) == [], "delivered before its time (law 8)"
        await bench.advance(bench.short)
        delivery = await bench.one(subscription)
        assert (delivery.task.id, delivery.task.value()) == ("t0", "t3")
        assert (await debounce(bench, "t4", wait)).status is Published.ACCEPTED
        await bench.expect(published=2, in_flight=1, scheduled=1)

    async def test_debounce_has_a_longest_wait(self, bench: Bench) -> None:
        """With ``max_wait``, publishes put a task off no longer than that after the first one (law 8; U12)."""
        wait = Debounce(seconds=2 * bench.short, max_wait=5 * bench.short)
        await debounce(bench, "t0", wait)
        subscription = bench.subscribe()
        for number in range(1, 5):
            await bench.advance(bench.short)
            await debounce(bench, f"t{number}", wait)
        await bench.advance(0.5 * bench.short)
        assert await bench.take(subscription) == [], "delivered before its time (law 8)"
        await bench.advance(0.6 * bench.short)
        assert (await debounce(bench, "t5", wait)).status is _REPLACED
        delivery = await bench.one(subscription)
        assert (delivery.task.id, delivery.task.value()) == ("t0", "t5")
        await debounce(bench, "t6", wait)
        await bench.advance(2.1 * bench.short)
        assert ids(await bench.take(subscription)) == ["t6"], (
            "it is due `seconds` after one publish"
        )

    @needs(Capability.CONTROL)
    async def test_replace_status(self, bench: Bench) -> None:
        """The status of a replaced task shows its new time and priority (U12)."""
        await bench.publish("t1", unique=key())
        at = bench.now + 100
        await replace(bench, "t2", not_before=at, priority=8)
        (status,) = await bench.control.statuses(KEY, "t1")
        assert status is not None
        assert (status.state, status.attempt) == (State.SCHEDULED, 1)
        assert status.due_at is not None
        assert abs(status.due_at - at) < 0.001


async def replace(
    bench: Bench, task_id: str, *, unique: dict[str, Any] | None = None, **fields: Any
) -> Confirmation:
    """Publish a task to `KEY` that replaces the holder of its unique key."""
    chosen = key(on_conflict="replace", **(unique or {}))
    (answer,) = await bench.offer(bench.task(task_id, unique=chosen, **fields))
    return answer


async def debounce(bench: Bench, task_id: str, wait: Debounce) -> Confirmation:
    """Publish a debounced task to `KEY`."""
    return await replace(bench, task_id, unique={"debounce": wait})
