"""Edges: the very moment, the exact number, nobody woken for nothing, and nothing left behind."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Delivery, Published, Task
from taskqueue_memory import MemoryBackend
from taskqueue_memory.records import _SMALL, QueueState, TaskRecord
from taskqueue_memory.subscription import MemorySubscription
from tests.memory.test_order import configure
from tests.memory.test_wakeups import counted_looks, hop, ids, stop, waiting


async def one(subscription: MemorySubscription) -> Delivery:
    """Take one task, which must be there."""
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    return delivery


def timers(clock: ManualClock) -> int:
    """Count the calls that are still to be made."""
    return len([timer for _, _, timer in clock._calls if timer._callback is not None])


# bells


async def test_a_closed_room_signal_leaves_nothing(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Fault G10: nothing is kept of closed room signals and of queues that were bound (fault M5)."""
    signals = backend._store.signals
    first, second = backend.publisher.room_signal("k", "j"), backend.publisher.room_signal("k")
    async with first:
        async with second:
            assert {key: len(who) for key, who in signals.open.items()} == {"k": 2, "j": 1}
            await configure(backend, capacity=1)
            await second.wait(5)
        assert {key: len(who) for key, who in signals.open.items()} == {"k": 1, "j": 1}
    assert signals.open == {}
    assert timers(clock) == 0
    for version, bound_to in enumerate((("a", "b"), ("b",), ())):
        await backend.control.configure("all", QueueSettings(version=version, bound_to=bound_to))
        assert set(signals._sources) == set(bound_to)


async def test_an_unbound_queue_sends_no_room_signal(backend: MemoryBackend) -> None:
    """Publishers of a queue hear of room in those that it is bound to now, and of no others (fault M5)."""
    for version, bound_to in enumerate((("a", "b"), ("b",))):
        await backend.control.configure("all", QueueSettings(version=version, bound_to=bound_to))
    async with backend.publisher.room_signal("all") as signal:
        backend._store.signals.notify("a")
        assert not signal._notified.is_set()
        backend._store.signals.notify("b")
        assert signal._notified.is_set()


async def test_a_room_signal_waits_as_long_as_asked(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Not at all for 0 seconds, and no shorter and no longer than half a second for that (fault M5)."""
    async with backend.publisher.room_signal("k") as signal:
        await asyncio.wait_for(signal.wait(0), 30)
        assert timers(clock) == 0
        wait = asyncio.ensure_future(signal.wait(0.5))
        await hop()
        await clock.advance(0.4)
        assert not wait.done()
        await clock.advance(0.1)
        assert wait.done()


async def test_a_room_signal_is_sent_for_room_alone(backend: MemoryBackend) -> None:
    """A task that is published, released, acked or retried makes no room; one that is delivered does (fault M5)."""
    await configure(backend, capacity=2)
    subscription = backend.subscribe(["k"], "w")
    async with backend.publisher.room_signal("k") as signal:
        await backend.publisher.publish(Task(key="k", id="a"), Task(key="k", id="b"))
        assert not signal._notified.is_set()
        first = await one(subscription)
        assert signal._notified.is_set()
        signal._notified.clear()
        await subscription.redeliver(first)
        await subscription.ack(await one(subscription))
        assert not signal._notified.is_set()
        await backend.control.cancel("k", "b")
        assert signal._notified.is_set()


# wake-ups


async def test_no_consumer_is_woken_without_a_task(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5: one task, returned, published or free of its key, is looked for by one of many that wait (fault M5)."""
    owner = backend.subscribe(["k"], "owner")
    await backend.publisher.publish(
        Task(key="k", id="a"),
        Task(key="k", id="holder", ordering_key="e"),
        Task(key="k", id="next", ordering_key="e"),
    )
    first, holder = (await owner.receive(9, 0)).deliveries
    receives = await waiting(*(backend.subscribe(["k"], f"w{n}") for n in range(10)))
    looks = counted_looks(monkeypatch)
    for step in (owner.redeliver(first), owner.ack(holder)):
        await step
        await hop()
    await backend.publisher.publish(Task(key="k", id="b"))
    await hop()
    assert len(looks) == 3
    assert ids([receive for receive in receives if receive.done()]) == [["a"], ["next"], ["b"]]
    await stop(*receives)


async def test_as_many_are_woken_as_there_is_work_for(backend: MemoryBackend) -> None:
    """Fault E4: a queue that goes on wakes at once as many of those who wait as it has tasks (fault M5)."""
    await configure(backend, paused=True)
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(3)))
    receives = await waiting(*(backend.subscribe(["k"], f"w{n}") for n in range(4)))
    queue = await configure(backend)
    assert len(queue.waiting) == 1
    await hop()
    assert ids(receives[:3]) == [["t0"], ["t1"], ["t2"]]
    await stop(*receives)


async def test_a_purge_wakes_no_consumer(
    backend: MemoryBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R8: those who wait for an entity go before who has it, lest each gets it in turn (fault M5)."""
    await backend.publisher.publish(
        *(Task(key="k", id=f"t{n}", ordering_key="e") for n in range(20))
    )
    subscription = backend.subscribe(["k"], "w")
    holder = await one(subscription)
    await backend.publisher.schedule_retry(holder.task, clock.now() + 60, settles=holder)
    (receive,) = await waiting(subscription)
    looks = counted_looks(monkeypatch)
    assert await backend.control.purge("k") == 20
    await hop()
    assert looks == []
    await stop(receive)


async def test_dates_share_one_timer(backend: MemoryBackend, clock: ManualClock) -> None:
    """Many tasks of one date, and receives that wait for them, set one timer, once (fault M5)."""
    at = clock.now() + 60
    await backend.publisher.publish(*(Task(key="k", not_before=at) for _ in range(10)))
    receives = await waiting(*(backend.subscribe(["k"], f"w{n}") for n in range(3)))
    assert len(clock._calls) == 1
    await stop(*receives)


# time


async def test_no_watch_without_a_limit(backend: MemoryBackend, clock: ManualClock) -> None:
    """C18: progress of a task that may take any time sets no date, at its first delivery or later (fault M5)."""
    await backend.publisher.publish(Task(key="k"))
    subscription = backend.subscribe(["k"], "w")
    for _ in range(2):
        delivery = await one(subscription)
        assert await backend.control.progress(delivery, 0.5)
        await clock.advance(1000)
        maintained = await backend.control.maintain()
        assert maintained.recovered == 0
        await subscription.redeliver(delivery)


async def test_recovered_deliveries_are_counted_once(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """C18: each maintenance pass counts what was recovered since the last one (fault M5)."""
    await configure(backend, max_processing_time=5)
    await backend.publisher.publish(Task(key="k"), Task(key="k"))
    assert len((await backend.subscribe(["k"], "w").receive(9, 0)).deliveries) == 2
    await clock.advance(5)
    assert [(await backend.control.maintain()).recovered for _ in range(3)] == [2, 0, 0]


async def test_a_deadline_that_came_at_this_moment(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Fault F19: who rises at the very time of its deadline ends, though that was passed over before (fault M5)."""
    await backend.publisher.publish(Task(key="k", id="t", deadline=clock.now() + 5))
    subscription = backend.subscribe(["k"], "w")
    await subscription.dead_letter(await one(subscription), "r")
    await clock.advance(5)
    assert (await backend.control.maintain()).expired == ()
    await backend.dead_letters.redrive("k", "t")
    assert [ended.task_id for ended in (await backend.control.maintain()).expired] == ["t"]


async def test_at_once_means_now(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 8: a task that may start at this very moment waits; one of a moment later is scheduled (fault M5)."""
    now = clock.now()
    await backend.publisher.publish(Task(key="k", not_before=now))
    assert (await backend.control.ledger("k")).waiting == 1
    await backend.publisher.publish(Task(key="k", not_before=now + 1e-3))
    assert (await backend.control.ledger("k")).scheduled == 1


async def test_a_result_ends_at_its_time(backend: MemoryBackend, clock: ManualClock) -> None:
    """A result is there until its time is over, and the id of its task is free at the end of it (fault M5)."""
    await configure(backend, dedupe_window=5, result_ttl=9)
    await backend.publisher.publish(Task(key="k", id="t"))
    subscription = backend.subscribe(["k"], "w")
    await subscription.ack(await one(subscription), results=[b"1"])
    await clock.advance(8.5)
    assert await backend.control.results("k", "t") == (b"1",)
    assert (await backend.control.maintain()).forgotten == 0
    await clock.advance(0.5)
    assert await backend.control.results("k", "t") == (None,)
    assert (await backend.control.maintain()).forgotten == 1


# what is left, and how much


async def test_copies_forget_along_the_way(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 7: each copy of a task forgets two that have ended, as a publish does (fault M5)."""
    await backend.control.configure("all", QueueSettings(bound_to=("a", "b", "c")))
    subscription = backend.subscribe(["a"], "w")
    for _ in range(20):
        await backend.publisher.publish(Task(key="a"))
        await subscription.ack(await one(subscription))
    await clock.advance(300)
    records = backend._store.queue("a").records
    before = len(records)
    backend._store.publish(Task(key="all"))
    assert len(records) == before - 6 + 1


async def test_a_refused_copy_leaves_no_queue(backend: MemoryBackend) -> None:
    """Fault G10: where one of several is full, those that nobody has used are not made (fault M5)."""
    await backend.control.configure("full", QueueSettings(intake_paused=True))
    await backend.control.configure("all", QueueSettings(bound_to=("full", "new")))
    (answer,) = await backend.publisher.publish(Task(key="all"))
    assert answer.status is Published.REFUSED
    assert await backend.control.queues() == ("all", "full")


async def test_the_last_place_of_a_bound_queue(backend: MemoryBackend) -> None:
    """A queue whose tasks go to others is never full itself (fault M5)."""
    await backend.control.configure("all", QueueSettings(bound_to=("a",), capacity=1))
    answers = await backend.publisher.publish(Task(key="all"), Task(key="all"))
    assert [answer.status for answer in answers] == [Published.ACCEPTED] * 2


async def test_a_page_of_dead_letters_has_a_hundred(backend: MemoryBackend) -> None:
    """Unless another number is asked for (fault M5)."""
    await backend.publisher.publish(*(Task(key="k", id=f"t{n:03}") for n in range(101)))
    subscription = backend.subscribe(["k"], "w")
    for delivery in (await subscription.receive(101, 0)).deliveries:
        await subscription.dead_letter(delivery, "r")
    assert len(await backend.dead_letters.list("k")) == 100
    assert len(await backend.dead_letters.list("k", after="t099")) == 1


async def test_small_payloads_stay(backend: MemoryBackend) -> None:
    """What is no longer than its digest is worth stays with an ended task (fault M5)."""
    subscription = backend.subscribe(["k"], "w")
    for size, kept in ((_SMALL, True), (_SMALL + 1, False)):
        payload = b'"' + b"x" * (size - 2) + b'"'
        await backend.publisher.publish(Task(key="k", id=str(size), payload=payload))
        await subscription.ack(await one(subscription))
        record = backend._store.queue("k").records[str(size)]
        assert (record.task.payload == payload, record.digest is None) == (kept, kept)


def test_records_of_one_task_are_distinguished() -> None:
    """Two records of one task are two: an old one, of which something is still noted, is not the new one (fault M5)."""
    queue, task = QueueState("k"), Task(key="k")
    assert len({TaskRecord(queue=queue, task=task), TaskRecord(queue=queue, task=task)}) == 2
