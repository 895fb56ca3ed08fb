"""Edge cases of the memory backend: exact times, exact counts, no needless wake-ups and no leftovers."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.authoring.entries import _SMALL
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Published, Task
from taskqueue_memory import MemoryBackend
from taskqueue_memory.records import QueueState, TaskRecord
from taskqueue_memory.subscription import MemorySubscription
from tests.memory.test_order import configure
from tests.memory.test_wakeups import counted_looks, hop, ids, stop, waiting


async def one(subscription: MemorySubscription) -> Delivery:
    """Receive exactly one delivery, which must be available."""
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    return delivery


def timers(clock: ManualClock) -> int:
    """Return the number of timers that are set and not cancelled."""
    return len([timer for _, _, timer in clock._calls if timer._callback is not None])


async def test_a_closed_room_signal_leaves_nothing(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Fault G10: no state remains of closed room signals and removed bindings (fault M5)."""
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
    """A room signal for a queue with bindings reports room in its current bound queues only (fault M5)."""
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
    """A room signal waits exactly as long as requested: not at all for 0, half a second for 0.5 (fault M5)."""
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
    """A room signal is sent if a task is delivered for the first time or cancelled.

    A publish, a release and an ack send none (fault M5).
    """
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


async def test_no_consumer_is_woken_without_a_task(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5: a task that becomes available wakes only one of several waiting receives.

    It may be released, published, or next for its ordering key (fault M5).
    """
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
    """Fault E4: when a queue is resumed, as many waiting receives are woken as it has tasks (fault M5)."""
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
    """R8: a purge wakes no consumer, because it cancels tasks that wait for an ordering key before its holder.

    Otherwise each of them would get the key in turn (fault M5).
    """
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
    """Several tasks with the same due time, and receives that wait for them, need just one timer (fault M5)."""
    at = clock.now() + 60
    await backend.publisher.publish(*(Task(key="k", not_before=at) for _ in range(10)))
    receives = await waiting(*(backend.subscribe(["k"], f"w{n}") for n in range(3)))
    assert len(clock._calls) == 1
    await stop(*receives)


async def test_no_watch_without_a_limit(backend: MemoryBackend, clock: ManualClock) -> None:
    """C18: without a limit on the processing time, a progress report sets no time limit (fault M5)."""
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
    """C18: each maintenance pass counts the stalled deliveries recovered since the last pass, once each (fault M5)."""
    await configure(backend, max_processing_time=5)
    await backend.publisher.publish(Task(key="k"), Task(key="k"))
    assert len((await backend.subscribe(["k"], "w").receive(9, 0)).deliveries) == 2
    await clock.advance(5)
    assert [(await backend.control.maintain()).recovered for _ in range(3)] == [2, 0, 0]


async def test_a_deadline_that_came_at_this_moment(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Fault F19: a dead task redriven exactly at its deadline expires, although a pass skipped it before (fault M5)."""
    await backend.publisher.publish(Task(key="k", id="t", deadline=clock.now() + 5))
    subscription = backend.subscribe(["k"], "w")
    await subscription.dead_letter(await one(subscription), "r")
    await clock.advance(5)
    assert (await backend.control.maintain()).expired == ()
    await backend.dead_letters.redrive("k", "t")
    assert [ended.task_id for ended in (await backend.control.maintain()).expired] == ["t"]


async def test_at_once_means_now(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 8: a task whose start time is now is waiting; with any later start time, it is scheduled (fault M5)."""
    now = clock.now()
    await backend.publisher.publish(Task(key="k", not_before=now))
    assert (await backend.control.ledger("k")).waiting == 1
    await backend.publisher.publish(Task(key="k", not_before=now + 1e-3))
    assert (await backend.control.ledger("k")).scheduled == 1


async def test_a_result_ends_at_its_time(backend: MemoryBackend, clock: ManualClock) -> None:
    """A result is kept until its time to live is over; then the id of its task is free again (fault M5)."""
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


async def test_copies_forget_along_the_way(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 7: publishing to a bound queue removes expired records, two per copy, as any publish does (fault M5)."""
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
    """Fault G10: if one of several bound queues refuses a task, no unused bound queue is created (fault M5)."""
    await backend.control.configure("full", QueueSettings(intake_paused=True))
    await backend.control.configure("all", QueueSettings(bound_to=("full", "new")))
    (answer,) = await backend.publisher.publish(Task(key="all"))
    assert answer.status is Published.REFUSED
    assert await backend.control.queues() == ("all", "full")


async def test_the_last_place_of_a_bound_queue(backend: MemoryBackend) -> None:
    """A queue with bindings is never full itself: its own capacity refuses no task (fault M5)."""
    await backend.control.configure("all", QueueSettings(bound_to=("a",), capacity=1))
    answers = await backend.publisher.publish(Task(key="all"), Task(key="all"))
    assert [answer.status for answer in answers] == [Published.ACCEPTED] * 2


async def test_a_page_of_dead_letters_has_a_hundred(backend: MemoryBackend) -> None:
    """A page of dead letters has 100 entries by default (fault M5)."""
    await backend.publisher.publish(*(Task(key="k", id=f"t{n:03}") for n in range(101)))
    subscription = backend.subscribe(["k"], "w")
    for delivery in (await subscription.receive(101, 0)).deliveries:
        await subscription.dead_letter(delivery, "r")
    assert len(await backend.dead_letters.list("k")) == 100
    assert len(await backend.dead_letters.list("k", after="t099")) == 1


async def test_small_payloads_stay(backend: MemoryBackend) -> None:
    """A small payload is kept when its task ends; a larger one is replaced by its digest (fault M5)."""
    subscription = backend.subscribe(["k"], "w")
    for size, kept in ((_SMALL, True), (_SMALL + 1, False)):
        payload = b'"' + b"x" * (size - 2) + b'"'
        await backend.publisher.publish(Task(key="k", id=str(size), payload=payload))
        await subscription.ack(await one(subscription))
        record = backend._store.queue("k").records[str(size)]
        assert (record.task.payload == payload, record.digest is None) == (kept, kept)


def test_records_of_one_task_are_distinguished() -> None:
    """Two records of one task are distinct, so that an old record is not mistaken for the current one (fault M5)."""
    queue, task = QueueState("k"), Task(key="k")
    assert len({TaskRecord(queue=queue, task=task), TaskRecord(queue=queue, task=task)}) == 2


async def test_idle_queues_are_removed(backend: MemoryBackend, clock: ManualClock) -> None:
    """A8: a queue that has been idle and empty for its `queue_ttl` is removed, unless it has settings (laws 1, 7)."""
    ttl = QueueSettings().queue_ttl
    await backend.control.configure("set", QueueSettings(capacity=9))
    for key in ("idle", "used", "set"):
        await backend.publisher.publish(Task(key=key, id="t"))
    consumer = backend.subscribe(["used", "idle", "set"], "w")
    deliveries = (await consumer.receive(3, 0)).deliveries
    await consumer.ack(*(delivery for delivery in deliveries if delivery.task.key != "used"))
    removed = []
    for _ in range(3):
        await clock.advance(ttl)
        removed.append((await backend.control.maintain()).removed)
    assert removed == [0, 0, 0], "a queue with a subscription was removed"
    await consumer.close()
    for _ in range(3):
        removed.append((await backend.control.maintain()).removed)
        await clock.advance(ttl)
    assert removed[3:] == [0, 1, 0]
    assert await backend.control.queues() == ("set", "used")


async def test_retry_tokens_are_bounded(backend: MemoryBackend) -> None:
    """A8: a task keeps the tokens of its last retries, which are duplicates when repeated, and no more."""
    task = Task(key="k", id="t")
    for number in range(3 * LIMITS.retry_tokens):
        told = await backend.publisher.schedule_retry(task, 1e10, token=str(number))
        assert told.status is Published.ACCEPTED
    record = backend._store.find("k", "t")
    assert record is not None
    assert len(record.tokens) == LIMITS.retry_tokens
    for number in range(2 * LIMITS.retry_tokens, 3 * LIMITS.retry_tokens):
        told = await backend.publisher.schedule_retry(task, 1e10, token=str(number))
        assert told.status is Published.DUPLICATE
