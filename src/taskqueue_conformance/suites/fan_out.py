"""The capability ``fan_out``: a publish stores a copy of the task in each queue in ``bound_to``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from taskqueue_conformance.bench import KEY, Bench, ids
from taskqueue_conformance.harness import Harness
from taskqueue_conformance.selection import needs
from taskqueue_conformance.suites.helpers import check_refused
from taskqueue_core.after import After, TaskRef
from taskqueue_core.backend import Capability
from taskqueue_core.capabilities import has
from taskqueue_core.errors import InvalidInput
from taskqueue_core.tasks import Ledger, Published, Refusal, State

_TRIES = 300
"""number of queue names to try; a partitioned store binds a queue only to queues in the same partition"""


class FanOutSuite(Harness, needs=(Capability.FAN_OUT, Capability.CONTROL)):
    """Tests of ``bound_to``."""

    @needs(Capability.DEAD_LETTERS)
    async def test_a_copy_in_each(self, bench: Bench) -> None:
        """Each queue in ``bound_to`` stores its own copy; the queue that was published to stores none (law 1; D9)."""
        name, two = await bound(bench, 2)
        (answer,) = await bench.offer(bench.task("t1", payload={"n": 1}, headers={"h": "x"}))
        assert (answer.key, answer.task_id, answer.status) == (KEY, "t1", Published.ACCEPTED)
        assert await bench.control.ledger(KEY) == Ledger()
        assert await bench.take(bench.subscribe()) == []
        first = await bench.one(bench.subscribe(name))
        second = await bench.one(bench.subscribe(two, consumer="another"))
        for delivery, key in ((first, name), (second, two)):
            task = delivery.task
            assert (task.key, task.id, task.value()) == (key, "t1", {"n": 1})
            assert task.headers == {"h": "x"}
            assert delivery.attempt == 1
        assert first.receipt != second.receipt
        await bench.subscribe(name).ack(first)
        await bench.bury(bench.subscribe(two), second)
        assert await bench.control.ledger(name) == Ledger(published=1, done=1)
        assert await bench.control.ledger(two) == Ledger(published=1, dead=1)
        assert await bench.state("t1", name) is State.DONE
        assert await bench.state("t1", two) is State.DEAD

    async def test_the_queue_itself(self, bench: Bench) -> None:
        """A queue that is bound to itself and to another queue also stores a copy (law 1; D9)."""
        (name,) = await bound(bench, 1)
        await bench.configure(bound_to=(KEY, name))
        await bench.publish("t1", "t2")
        for key in (KEY, name):
            assert await bench.control.ledger(key) == Ledger(published=2, waiting=2)
            assert ids(await bench.take(bench.subscribe(key), 9)) == ["t1", "t2"]

    async def test_copies_wake(self, bench: Bench) -> None:
        """A copy wakes a receive that waits on a bound queue (D9)."""
        targets = await bound(bench, 2)
        receives = [bench.subscribe(key, consumer=key).receive(1, None) for key in targets]
        waiting = [await bench.start(receive) for receive in receives]
        await bench.publish("t1")
        for waiter in waiting:
            assert ids((await bench.outcome(waiter)).deliveries) == ["t1"]

    @needs(Capability.FLOW)
    async def test_all_or_nothing(self, bench: Bench) -> None:
        """If one bound queue refuses a task, no queue stores a copy; the answer has the reason (laws 1, 6; D9)."""
        key, two = await bound(bench, 2)
        await bench.limit(two, capacity=1)
        await bench.publish("t1")
        answers = await bench.offer("t2", "t3")
        for answer, name in zip(answers, ("t2", "t3"), strict=True):
            assert (answer.key, answer.task_id) == (KEY, name)
            check_refused(answer, Refusal.QUEUE_FULL, depth=1, by=two)
        await bench.one(bench.subscribe(two))
        await bench.limit(two, intake_paused=True)
        (answer,) = await bench.offer("t2")
        check_refused(answer, Refusal.INTAKE_PAUSED, by=two)
        await bench.limit(two, intake_paused=False, moved_to="elsewhere")
        (answer,) = await bench.offer("t2")
        assert (answer.status, answer.code) == (Published.REFUSED, Refusal.MOVED)
        assert answer.reason, "refused without a reason (law 6)"
        assert await bench.control.ledger(key) == Ledger(published=1, waiting=1)
        await bench.limit(two, moved_to=None)
        await bench.publish("t2")

    async def test_known_to_all(self, bench: Bench) -> None:
        """A task that all bound queues know, live or ended, is a duplicate and is not stored (law 7; D9)."""
        name, two = await bound(bench, 2)
        await bench.publish("t1")
        subscription = bench.subscribe(name)
        await subscription.ack(await bench.one(subscription))
        (answer,) = await bench.offer("t1")
        assert answer.status is Published.DUPLICATE
        assert await bench.control.ledger(name) == Ledger(published=1, done=1)
        assert await bench.control.ledger(two) == Ledger(published=1, waiting=1)

    async def test_known_to_some(self, bench: Bench) -> None:
        """Bound queues that lack a task store it, even if a queue that has the task is full (laws 6, 7; D9)."""
        name, two = await bound(bench, 2)
        await bench.publish("t1", key=name)
        if has(bench.backend, Capability.FLOW):
            await bench.limit(name, capacity=1)
        await bench.publish("t1")
        for key in (name, two):
            assert await bench.control.ledger(key) == Ledger(published=1, waiting=1)

    async def test_conflict_in_one(self, bench: Bench) -> None:
        """If one bound queue has the id with another payload, no queue stores a copy (law 7; D9)."""
        name, two = await bound(bench, 2)
        await bench.publish("t1", key=two, payload="other")
        (answer,) = await bench.offer("t1")
        assert answer.status is Published.CONFLICT
        assert await bench.control.ledger(name) == Ledger()
        (delivery,) = await bench.take(bench.subscribe(two), 9)
        assert delivery.task.value() == "other"

    async def test_no_chains(self, bench: Bench) -> None:
        """A copy is not copied again by the bindings of its own queue, so bindings may form a cycle (D9)."""
        (name,) = await bound(bench, 1)
        (two,) = await bound(bench, 1, of=name)
        await bench.configure(name, bound_to=(two, KEY))
        await bench.publish("t1")
        assert await bench.control.ledger(name) == Ledger(published=1, waiting=1)
        for key in (two, KEY):
            assert await bench.control.ledger(key) == Ledger(), "a copy was copied"

    async def test_dates_travel(self, bench: Bench) -> None:
        """Copies keep priority, deadline and ``not_before``; each copy expires or is due on its own (law 8; D9)."""
        name, two = await bound(bench, 2)
        later = bench.now + bench.short
        await bench.publish("low", priority=1)
        await bench.publish("due", not_before=later, priority=9)
        await bench.publish("late", deadline=later)
        for key in (name, two):
            assert await bench.control.ledger(key) == Ledger(published=3, waiting=2, scheduled=1)
        assert ids(await bench.take(bench.subscribe(name), 1)) == ["late"]
        await bench.advance(bench.short)
        expired = [entry for _ in range(3) for entry in (await bench.control.maintain()).expired]
        assert {(entry.key, entry.task_id) for entry in expired} == {(name, "late"), (two, "late")}
        assert len(expired) == 2
        for key in (name, two):
            taken = await bench.eventually(bench.subscribe(key), 2)
            assert ids(taken) == ["due", "low"]

    async def test_a_batch_of_several_queues(self, bench: Bench) -> None:
        """In a batch for several queues, each task follows the bindings of its own queue (laws 1, 7; D9)."""
        (name,) = await bound(bench, 1)
        chosen: list[tuple[str, dict[str, str]]] = [
            ("t1", {}),
            ("t2", {"key": "plain"}),
            ("t1", {}),
        ]
        chosen += [("t3", {"key": name}), ("t3", {}), ("t2", {"payload": "other"})]
        tasks = [bench.task(task_id, **fields) for task_id, fields in chosen]
        answers = await bench.offer(*tasks)
        assert [(a.key, a.task_id) for a in answers] == [(task.key, task.id) for task in tasks]
        new, known = Published.ACCEPTED, Published.DUPLICATE
        statuses = [answer.status for answer in answers]
        assert statuses[:3] + statuses[5:] == [new, new, known, new]
        assert sorted(statuses[3:5]) == [new, known], "exactly one must be accepted (law 7)"
        assert sorted(ids(await bench.take(bench.subscribe(name), 9))) == ["t1", "t2", "t3"]
        assert ids(await bench.take(bench.subscribe("plain"), 9)) == ["t2"]
        assert await bench.control.ledger(KEY) == Ledger()

    async def test_unbound(self, bench: Bench) -> None:
        """Adding or removing a binding takes effect with the next publish; existing copies are kept (laws 1, 9; D9)."""
        await bench.publish("before")
        (name,) = await bound(bench, 1)
        await bench.publish("bound")
        await bench.configure(bound_to=())
        await bench.publish("after")
        assert ids(await bench.take(bench.subscribe(), 9)) == ["before", "after"]
        assert ids(await bench.take(bench.subscribe(name), 9)) == ["bound"]

    @needs("atomic_retry")
    async def test_retries_stay_where_they_are(self, bench: Bench) -> None:
        """Retrying a copy affects only the queue that stores the copy (laws 1, 3; D9)."""
        name, two = await bound(bench, 2)
        await bench.publish("t1")
        subscription = bench.subscribe(name)
        delivery = await bench.one(subscription)
        await bench.retry(delivery.task, settles=delivery)
        (again,) = await bench.eventually(subscription, 1)
        assert (again.task.key, again.attempt) == (name, 2)
        assert await bench.control.ledger(two) == Ledger(published=1, waiting=1)
        assert (await bench.one(bench.subscribe(two))).attempt == 1

    @needs(Capability.FLOW, Capability.FAIR_ORDER)
    async def test_with_limits(self, bench: Bench) -> None:
        """A queue with limits, or with fair order, can be bound to other queues (law 1; D9)."""
        (name,) = await bound(bench, 1)
        await bench.limit(max_inflight=1, max_processing_time=60)
        await bench.publish("t1", "t2")
        assert await bench.control.ledger(KEY) == Ledger()
        await bench.fair(max_processing_time=None)
        await bench.publish("t3")
        assert await bench.control.ledger(KEY) == Ledger()
        assert ids(await bench.take(bench.subscribe(name), 9)) == ["t1", "t2", "t3"]

    @needs(Capability.AFTER)
    async def test_parents_of_copies(self, bench: Bench) -> None:
        """Copies that would wait for more than 2,000 tasks in all are refused; no queue stores one (law 6; U16)."""
        targets = await bound(bench, 3)
        parents = tuple(TaskRef(targets[0], f"p{n}") for n in range(667))
        (answer,) = await bench.offer(bench.task("t1", after=After(tasks=parents)))
        assert (answer.status, answer.code) == (Published.REFUSED, Refusal.TOO_MANY_PARENTS)
        for key in targets:
            assert await bench.control.ledger(key) == Ledger()
        await bench.publish("p0", key=targets[0])
        (answer,) = await bench.offer(bench.task("t2", after=After(tasks=parents[:1])))
        assert answer.status is Published.ACCEPTED

    async def test_side_by_side(self, bench: Bench) -> None:
        """Concurrent publishers store one copy of each task in each bound queue (laws 7, 10; D9)."""
        name, two = await bound(bench, 2)
        tasks = [bench.task(f"t{n}") for n in range(10)]
        matches = await asyncio.gather(*(bench.offer(*tasks) for _ in range(5)))
        fresh = [a for answers in matches for a in answers if a.status is Published.ACCEPTED]
        assert len(fresh) == 10
        for key in (name, two):
            assert await bench.control.ledger(key) == Ledger(published=10, waiting=10)


async def bound(bench: Bench, count: int, *, of: str = KEY) -> tuple[str, ...]:
    """Bind a queue to ``count`` other queues, and return their names."""
    targets = [name async for name in _bindable(bench, of, count)]
    assert len(targets) == count, f"{of!r} can be bound to only {len(targets)} of {_TRIES} queues"
    await bench.configure(of, bound_to=tuple(targets))
    return tuple(targets)


async def _bindable(bench: Bench, of: str, count: int) -> AsyncIterator[str]:
    """Yield up to ``count`` names of queues that ``of`` can be bound to; a partitioned store refuses some names."""
    for number in range(_TRIES):
        if not count:
            return
        name = f"{of}-copy{number}"
        try:
            await bench.configure(of, bound_to=(name,))
        except InvalidInput as refused:
            if refused.field != "bound_to":
                raise
        else:
            yield name
            count -= 1
