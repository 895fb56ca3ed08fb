"""Memory use: live tasks are kept completely, ended tasks only in short form, and forgotten tasks not at all."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Ledger, Published, Settled, State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_memory.due_heap import ROOM, DueHeap
from taskqueue_memory.records import QueueState, TaskRecord

LARGE = b'"' + b"x" * 50_000 + b'"'


@pytest.fixture
def records() -> Iterator[Callable[[], int]]:
    """Return a function that counts the task records created since the test began and still in memory."""

    def count() -> int:
        gc.collect()
        return sum(isinstance(thing, TaskRecord) for thing in gc.get_objects())

    gc.freeze()  # so that the garbage collector skips older objects, which would take long
    yield count
    gc.unfreeze()


async def work(backend: MemoryBackend, count: int, **fields: Any) -> None:
    """Publish, receive and ack ``count`` tasks, one by one."""
    subscription = backend.subscribe(["k"], "w")
    for _ in range(count):
        await backend.publisher.publish(Task(key="k", **fields))
        await subscription.ack(*(await subscription.receive(1, 0)).deliveries)
    await subscription.close()


@pytest.mark.parametrize("far", [{}, {"deadline": 2e9}], ids=["no deadline", "far deadline"])
async def test_ended_tasks_are_forgotten(
    far: dict[str, Any], backend: MemoryBackend, clock: ManualClock, records: Callable[[], int]
) -> None:
    """Law 7: after the deduplication window, an ended task leaves only its count, even if its deadline is far away."""
    await work(backend, 500, **far)
    assert records() >= 500
    await clock.advance(300)
    assert (await backend.control.maintain()).forgotten == 500
    assert records() <= 2 * ROOM
    assert await backend.control.ledger("k") == Ledger(published=500, done=500)


async def test_publishing_forgets_along_the_way(backend: MemoryBackend, clock: ManualClock) -> None:
    """Without maintenance, each publish removes slightly more old records than it adds, so memory use is bounded."""
    await work(backend, 300)
    await clock.advance(300)
    known = backend._store.queues["k"].records
    sizes = []
    for _ in range(300):
        await backend.publisher.publish(Task(key="k"))
        sizes.append(len(known))
    assert sizes[:3] == [299, 298, 297]
    assert sizes[-1] == 300


async def test_forgetting_is_bounded(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 10: one maintenance pass removes at most 1,000 old records, and the next pass continues."""
    await work(backend, 2500)
    await clock.advance(300)
    passes = [(await backend.control.maintain()).forgotten for _ in range(4)]
    assert passes == [1000, 1000, 500, 0]


@pytest.mark.parametrize("state", ["done", "cancelled", "expired", "discarded"])
async def test_large_payloads_go_with_the_end(
    state: str, backend: MemoryBackend, clock: ManualClock
) -> None:
    """Law 7: an ended task keeps a digest of its large payload.

    With it, another payload for its id is still detected.
    """
    task = Task(key="k", id="t", payload=LARGE, deadline=clock.now() + 10)
    await backend.publisher.publish(task)
    subscription = backend.subscribe(["k"], "w")
    if state == "cancelled":
        await backend.control.cancel("k", "t")
    elif state == "expired":
        await clock.advance(10)
        await backend.control.maintain()
    elif state == "discarded":
        (delivery,) = (await subscription.receive(1, 0)).deliveries
        await subscription.dead_letter(delivery, "bad")
        assert (await backend.dead_letters.list("k"))[0].task.payload == LARGE
        await backend.dead_letters.discard("k")
    else:
        await subscription.ack(*(await subscription.receive(1, 0)).deliveries)
    record = backend._store.find("k", "t")
    assert record is not None
    assert record.state is State(state)
    assert len(record.task.payload) < 10
    other = Task(key="k", id="t", payload=LARGE.replace(b"x", b"y", 1))
    null = Task(key="k", id="t")
    answers = await backend.publisher.publish(task, other, null)
    assert [a.status for a in answers] == [Published.DUPLICATE, *[Published.CONFLICT] * 2]


async def test_a_retry_after_the_end_has_the_payload(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Fault F11: a task that is retried after its ack is delivered with its complete payload."""
    task = Task(key="k", id="t", payload=LARGE)
    await backend.publisher.publish(task)
    subscription = backend.subscribe(["k"], "w")
    await subscription.ack(*(await subscription.receive(1, 0)).deliveries)
    await backend.publisher.schedule_retry(task, clock.now() + 1)
    await clock.advance(1)
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    assert (delivery.task, delivery.attempt) == (task, 2)
    assert await subscription.ack(delivery) == (Settled.OK,)


async def test_memory_does_not_grow_with_what_ended(backend: MemoryBackend) -> None:
    """Ended tasks with payloads of 50 kB each use less than 2.5 kB of memory per task."""
    count = 500
    tracemalloc.start()
    try:
        await work(backend, 200, payload=LARGE)
        before = tracemalloc.get_traced_memory()[0]
        for n in range(count):
            await work(backend, 1, payload=LARGE.replace(b"x", bytes([97 + n % 20])))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < count * 2500


@pytest.mark.parametrize("kind", ["waiting", "scheduled"])
async def test_what_was_cancelled_does_not_pile_up(
    kind: str, backend: MemoryBackend, clock: ManualClock
) -> None:
    """Publishing and cancelling again and again, without any receive, keeps a bounded number of entries."""
    not_before = clock.now() + 1e6 if kind == "scheduled" else None
    await backend.publisher.publish(Task(key="k", id="stays", not_before=not_before))
    for n in range(2000):
        await backend.publisher.publish(Task(key="k", id=f"t{n}", not_before=not_before))
        await backend.control.cancel("k", f"t{n}")
    queue = backend._store.queues["k"]
    lane = queue._lines.lane(queue.records["stays"])
    assert len(lane._fresh) <= 2 * ROOM
    assert len(queue.scheduled) <= 2 * ROOM
    assert len(backend._store.timers._scheduled) <= 2 * ROOM
    if kind == "scheduled":
        await clock.advance(1e6)
    (delivery,) = (await backend.subscribe(["k"], "w").receive(9, 0)).deliveries
    assert delivery.task.id == "stays"


async def test_clearing_loses_nothing(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 1: of thousands of tasks, half of them cancelled, all others are delivered in order."""
    soon = clock.now() + 5
    for n in range(3000):
        await backend.publisher.publish(
            Task(key="now", id=f"t{n}"), Task(key="later", id=f"t{n}", not_before=soon)
        )
        if n % 2:
            await backend.control.cancel("now", f"t{n}")
            await backend.control.cancel("later", f"t{n}")
    await clock.advance(5)
    for key in ("now", "later"):
        received = await backend.subscribe([key], "w").receive(3000, 0)
        assert [d.task.id for d in received.deliveries] == [f"t{n}" for n in range(0, 3000, 2)]
        assert not received.again


def test_an_agenda_in_order() -> None:
    """A heap gives entries by time, equal times in order of insertion, and skips stale entries."""
    agenda: DueHeap[TaskRecord] = DueHeap(lambda record, _seq: record.state is State.WAITING)
    queue = QueueState("k")
    made = [TaskRecord(queue=queue, task=Task(key="k"), state=State.WAITING) for _ in range(6)]
    for record, at in zip(made, (3, 1, 2, 1, 9, 2), strict=True):
        agenda.add(at, record, record.seq)
    made[2].state = State.DONE
    assert agenda.next_at() == 1
    assert list(agenda.take(2, 2)) == [made[1], made[3]]
    assert list(agenda.take(5)) == [made[5], made[0]]
    assert (agenda.next_at(), list(agenda.take(5))) == (9, [])


async def test_expiry_is_bounded(backend: MemoryBackend, clock: ManualClock) -> None:
    """Law 8: one receive expires at most 1,000 overdue tasks, so that thousands of them do not block the event loop."""
    deadline = clock.now() + 1
    for start in range(0, 2500, 500):
        await backend.publisher.publish(
            *(Task(key="k", id=f"t{start + n}", deadline=deadline) for n in range(500))
        )
    await backend.publisher.publish(Task(key="k", id="alive"))
    await clock.advance(1)
    subscription = backend.subscribe(["k"], "w")
    answers = [await subscription.receive(1, 0) for _ in range(4)]
    assert [len(answer.expired) for answer in answers] == [1000, 1000, 500, 0]
    assert [answer.again for answer in answers] == [True, True, False, False]
    assert [d.task.id for a in answers for d in a.deliveries] == ["alive"]


async def test_keys_of_gone_workers_leave_nothing(backend: MemoryBackend) -> None:
    """Fault G10: a queue that exists only because of a subscription is removed with the last one.

    A used or configured queue stays.
    """
    await backend.control.configure("configured", QueueSettings(max_losses=1))
    await backend.publisher.publish(Task(key="used"))
    await work(backend, 1)
    first = backend.subscribe(["a", "b", "configured", "used", "k"], "w")
    second = backend.subscribe(["b"], "w")
    assert await backend.control.queues() == ("a", "b", "configured", "k", "used")
    await first.close()
    assert await backend.control.queues() == ("b", "configured", "k", "used")
    await backend.publisher.publish(Task(key="b", id="late"))
    assert [d.task.id for d in (await second.receive(1, 0)).deliveries] == ["late"]
    await second.close()
    assert await backend.control.queues() == ("b", "configured", "k", "used")


async def test_rising_again_and_again_takes_no_room(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Fault F19: a task that dies and is redriven 1,000 times has one deadline entry.

    It still expires at its deadline.
    """
    await backend.publisher.publish(Task(key="k", id="t", deadline=clock.now() + 100))
    subscription = backend.subscribe(["k"], "w")
    for _ in range(1000):
        (delivery,) = (await subscription.receive(1, 0)).deliveries
        await subscription.dead_letter(delivery, "r")
        await backend.dead_letters.redrive("k", "t")
    assert len(backend._store.timers.deadlines) == 1
    await clock.advance(100)
    assert [e.task_id for e in (await backend.control.maintain()).expired] == ["t"]
    assert await backend.control.ledger("k") == Ledger(published=1, expired=1)


async def test_a_wider_window_acts_on_what_has_ended(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """Laws 7 and 9, fault F18: the current deduplication window decides when an id is forgotten.

    This holds for tasks that ended earlier too.
    """
    await backend.control.configure("k", QueueSettings(dedupe_window=10))
    await work(backend, 1, id="t")
    await backend.control.configure("k", QueueSettings(version=1, dedupe_window=100))
    await clock.advance(99)
    assert (await backend.control.maintain()).forgotten == 0
    (again,) = await backend.publisher.publish(Task(key="k", id="t"))
    assert again.status is Published.DUPLICATE
    await clock.advance(1)
    assert (await backend.control.maintain()).forgotten == 1
