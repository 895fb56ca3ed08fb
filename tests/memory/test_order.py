"""Fair order and ordering keys in the memory backend: memory use, speed and wake-ups."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from hypothesis import given, settings

from taskqueue_core.authoring import helpers
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Task
from taskqueue_memory import MemoryBackend
from taskqueue_memory.due_heap import ROOM
from taskqueue_memory.records import QueueState
from tests.memory.histories import FAIR, History, moves
from tests.memory.test_wakeups import hop, ids, waiting


async def configure(backend: MemoryBackend, **fields: Any) -> QueueState:
    """Configure the queue ``k`` with these settings, and return its internal state."""
    present = await backend.control.settings("k")
    await backend.control.configure("k", QueueSettings(version=present.version, **fields))
    return backend._store.queue("k")


@pytest.mark.parametrize("rate", [None, RateLimit(max_tokens=2, interval=60)], ids=["", "rate"])
async def test_tenants_leave_nothing(
    rate: RateLimit | None, backend: MemoryBackend, clock: ManualClock
) -> None:
    """OPEN-B2: no state of a tenant remains once it has no tasks and its rate limit has refilled."""
    queue = await configure(backend, **FAIR, tenant_rate_limit=rate, tenant_max_inflight=1)
    subscription = backend.subscribe(["k"], "w")
    for n in range(3000):
        await backend.publisher.publish(Task(key="k", tenant=f"t{n}", priority=n % 3))
        await subscription.ack(*(await subscription.receive(9, 0)).deliveries)
    assert queue.fair is not None
    assert len(queue.fair._accounts) == (3000 if rate else 0)
    await clock.advance(60)
    for _ in range(10):
        await backend.control.maintain()
    assert len(queue.fair._accounts) == 0
    assert all(len(walk._heap) <= 2 * ROOM for walk in queue.fair._walks.values())
    assert len(queue.fair._fillings) <= 2 * ROOM


async def test_tenants_that_give_up_leave_nothing(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """B2, OPEN-B2: cancelling all tasks, waiting and scheduled ones, removes all state of their tenants and keys."""
    queue = await configure(backend, **FAIR, tenant_capacity=2)
    for n in range(200):
        fields: dict[str, Any] = {"tenant": f"t{n}", "ordering_key": f"e{n % 50}"}
        await backend.publisher.publish(
            Task(key="k", id=f"c{n}", **fields),
            Task(key="k", id=f"s{n}", not_before=clock.now() + 1e6, **fields),
        )
    assert queue.fair is not None
    assert (len(queue.fair._accounts), len(queue.turns._holders), queue.available) == (200, 50, 50)
    for n in range(200):
        await backend.control.cancel("k", f"c{n}")
        await backend.control.cancel("k", f"s{n}")
    assert (len(queue.fair._accounts), len(queue.turns._holders), queue.available) == (0, 0, 0)


async def test_tokens_bring_tenants_along_the_way(
    backend: MemoryBackend, clock: ManualClock
) -> None:
    """OPEN-B2: without maintenance, normal use removes more idle tenants than it adds."""
    limit = RateLimit(max_tokens=1)
    queue = await configure(backend, **FAIR, tenant_rate_limit=limit)
    subscription = backend.subscribe(["k"], "w")
    for n in range(2000):
        await backend.publisher.publish(Task(key="k", tenant=f"t{n}"))
        await subscription.ack(*(await subscription.receive(9, 0)).deliveries)
        await clock.advance(0.1)
    assert queue.fair is not None
    assert len(queue.fair._accounts) <= 20


async def test_resting_costs_nothing(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPEN-F1: receives do not check 2,000 tenants at their limits in order to find tasks of other tenants."""
    await configure(backend, **FAIR, tenant_max_inflight=1)
    holder, subscription = backend.subscribe(["k"], "h"), backend.subscribe(["k"], "w")
    for _ in range(2):
        await backend.publisher.publish(*(Task(key="k", tenant=f"t{n}") for n in range(2000)))
    assert len((await holder.receive(5000, 0)).deliveries) == 2000
    looked = 0

    def room_of(*told: Any) -> helpers.QueueRoom:
        nonlocal looked
        looked += 1
        return helpers.room_of(*told)

    monkeypatch.setattr("taskqueue_memory.tenants.room_of", room_of)
    for _ in range(50):
        assert not (await subscription.receive(9, 0)).deliveries
    assert looked == 0
    for n in range(50):
        await backend.publisher.publish(Task(key="k", tenant=f"other{n}"))
        (delivery,) = (await subscription.receive(9, 0)).deliveries
        await subscription.ack(delivery)
    assert looked <= 200


async def test_a_swap_of_many(backend: MemoryBackend) -> None:
    """B12: with 10,000 tasks waiting, switching to fair order and back is fast and loses no task."""
    count = int(os.environ.get("TASKQUEUE_SWAP_TASKS", "10000"))
    for start in range(0, count, 1000):
        await backend.publisher.publish(
            *(Task(key="k", id=str(n), tenant=f"t{n % 100}") for n in range(start, start + 1000))
        )
    subscription = backend.subscribe(["k"], "w")
    back = (await subscription.receive(2, 0)).deliveries
    await subscription.redeliver(*back)
    began = time.process_time()
    await configure(backend, **FAIR)
    assert time.process_time() - began < 10
    fair = (await subscription.receive(200, 0)).deliveries
    assert [d.task.tenant for d in fair] == 2 * [f"t{n}" for n in range(100)]
    await configure(backend)
    rest = (await subscription.receive(count, 0)).deliveries
    assert [int(d.task.id) for d in rest] == list(range(200, count))


async def test_who_waits_for_an_entity_does_not_pile_up(backend: MemoryBackend) -> None:
    """R8: publishing with a busy ordering key and cancelling, again and again, keeps a bounded number of entries."""
    await backend.publisher.publish(Task(key="k", id="holder", ordering_key="e"))
    for n in range(2000):
        await backend.publisher.publish(Task(key="k", id=f"t{n}", ordering_key="e"))
        await backend.control.cancel("k", f"t{n}")
    queue = backend._store.queue("k")
    (lane,) = queue.turns
    assert len(lane._fresh) <= 2 * ROOM
    # Each task that gets the ordering key enters a lane from which no consumer takes.
    for n in range(2000):
        await backend.publisher.publish(Task(key="k", id=f"u{n}", ordering_key="e"))
        await backend.control.cancel("k", "holder" if not n else f"u{n - 1}")
    lane = queue._lines.lane(queue.records["u1999"])
    assert len(lane._late) <= 2 * ROOM


async def test_progress_keeps_one_date(backend: MemoryBackend, clock: ManualClock) -> None:
    """C18: repeated progress reports of a task keep a bounded number of time limits, and none after its end."""
    await configure(backend, max_processing_time=60)
    await backend.publisher.publish(Task(key="k"))
    subscription = backend.subscribe(["k"], "w")
    (delivery,) = (await subscription.receive(1, 0)).deliveries
    for _ in range(2000):
        await clock.advance(1)
        assert await backend.control.progress(delivery, 0.5)
    assert len(backend._store.timers._flights) <= 2 * ROOM
    await subscription.ack(delivery)
    assert backend._store.queue("k").flights.next_at() is None


async def test_a_key_comes_to_a_tenant_at_rest(backend: MemoryBackend, clock: ManualClock) -> None:
    """OPEN-F1, R8: a task that gets its ordering key while its tenant has no token is delivered with the next token."""
    await configure(backend, **FAIR, tenant_rate_limit=RateLimit(max_tokens=1, interval=4))
    await backend.publisher.publish(
        Task(key="k", id="holder", tenant="t1", ordering_key="e"),
        Task(key="k", id="first", tenant="t2"),
        Task(key="k", id="next", tenant="t2", ordering_key="e"),
    )
    subscription = backend.subscribe(["k"], "w")
    holder, first = (await subscription.receive(9, 0)).deliveries
    await clock.advance(1)
    (receive,) = await waiting(subscription)
    other = backend.subscribe(["k"], "v")
    await other.ack(first, holder)
    assert (await other.receive(9, 0)).due_at == clock.now() + 3
    await clock.advance(2.9)
    assert not receive.done()
    await clock.advance(0.1)
    assert ids([receive]) == [["next"]]


HISTORIES = int(os.environ.get("TASKQUEUE_KIT_EXAMPLES", "120"))
"""number of random histories; `dev.py soak` sets it high"""


@settings(max_examples=HISTORIES, deadline=None)
@given(moves)
async def test_no_consumer_waits_while_a_task_is_available(
    steps: list[tuple[str, tuple[Any, ...]]],
) -> None:
    """Fault E4, laws 4, 5, 9, OPEN-F1, R8: after any history, all counters are right.

    No receive waits while a task is available.
    """
    history = History()
    for move, values in steps:
        await history.move(move, values)
        history.count()
    for _ in range(6):
        await hop()
        history.check()
        await history.advance(0.5)
        history.count()
    await history.backend.aclose()
    await hop()
