"""Lists and streams of a `RecordBackend`: bounded steps, restarts, and what is deleted, beyond the conformance kit."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from taskqueue_core.authoring.listings import ENDED, Query
from taskqueue_core.capabilities import NewEvent, NewEvents, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import InvalidInput
from taskqueue_core.recordstore import RecordBackend, event_streams, kept_tasks, listing
from taskqueue_core.tasks import Delivery, Published, State, Task
from taskqueue_core.uniqueness import UniqueKey
from tests.core.dict_store import DictStore, Disk

DAY = 86_400


@pytest.fixture
def store() -> DictStore:
    """The store below the backend."""
    return DictStore(Disk())


@pytest.fixture
def backend(clock: ManualClock, store: DictStore) -> RecordBackend:
    """A backend on an empty store."""
    return RecordBackend("dict", store, clock, durable=True)


def reopened(store: DictStore, clock: ManualClock) -> RecordBackend:
    """Return a backend on what another one, which died, has left behind."""
    return RecordBackend("dict", DictStore(store.disk), clock, durable=True)


async def delivered(backend: RecordBackend) -> Delivery:
    """Return the next delivery of a new subscription."""
    (delivery,) = (await backend.subscribe(["k"], "w").receive(1, 0)).deliveries
    return delivery


async def stream(backend: RecordBackend, delivery: Delivery, number: int) -> None:
    """Append events to a running task."""
    events = tuple(NewEvent(value=b"%d" % each) for each in range(number))
    await backend.streams.append(NewEvents(delivery=delivery, events=events, first=1))


async def names(backend: RecordBackend, state: State = State.DONE) -> list[str]:
    """Return the ids on the first page of a list."""
    return [task.task_id for task in (await backend.listing.tasks("k", state=state)).tasks]


async def test_a_page_reads_in_steps(
    backend: RecordBackend, store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 11: a page reads only what it shows, and with a filter a limited number of records, in bounded steps."""
    monkeypatch.setattr(listing, "LOOKED_AT", 22)
    monkeypatch.setattr(listing, "_AT_ONCE", 10)
    tasks = (Task(key="k", id=f"t{n:02}", tenant="a" if n < 40 else "b") for n in range(42))
    await backend.publisher.publish(*tasks)
    page = await backend.listing.tasks("k", state=State.WAITING, limit=15)
    assert (len(page.tasks), page.looked_at) == (15, 15)
    found, cursor = [], None
    for looked_at in (22, 20):
        before = store.transactions
        query = {"state": State.WAITING, "tenant": "b", "after": cursor}
        called = asyncio.ensure_future(backend.listing.tasks("k", **query))  # type: ignore[arg-type]
        while not called.done():
            at_once = store.transactions
            await asyncio.sleep(0)
            assert store.transactions - at_once <= 1
        page = called.result()
        assert store.transactions - before == 3 - (looked_at == 20)
        assert page.looked_at == looked_at
        found += [task.task_id for task in page.tasks]
        cursor = page.next
    assert (found, cursor) == (["t40", "t41"], None)


async def test_forged_positions(backend: RecordBackend) -> None:
    """U18: a cursor with a position that no record can have is refused before the store is asked."""
    query = Query(key="k", state=State.WAITING)
    for position in (("x" * 301,), ("\u00e9",), ("a\n",), (1,), ()):
        with pytest.raises(InvalidInput, match="after"):
            await backend.listing.tasks("k", state=State.WAITING, after=query.cursor(position))


async def test_after_a_restart(
    backend: RecordBackend, store: DictStore, clock: ManualClock
) -> None:
    """Law 11, law 12: a walk and a reader continue with another process; tags and events outlive the first one."""
    await backend.control.configure("k", QueueSettings(index=("user",)))
    tasks = [Task(key="k", id=f"t{n}", tags=("user:1",)) for n in range(4)]
    await backend.publisher.publish(*tasks)
    await stream(backend, await delivered(backend), 2)
    page = await backend.listing.tasks("k", tag="user:1", limit=2)
    events = await backend.streams.events("k", "t0", limit=2)
    heir = reopened(store, clock)
    await heir.publisher.publish(Task(key="k", id="t4", tags=("user:1",)))
    rest = await heir.listing.tasks("k", tag="user:1", after=page.next)
    assert [task.task_id for task in (*page.tasks, *rest.tasks)] == ["t0", "t1", "t2", "t3", "t4"]
    assert (await delivered(heir)).task.id == "t0"
    assert events is not None
    later = await heir.streams.events("k", "t0", after=events.next)
    assert later is not None
    assert [each.id for each in later.events] == ["1-3"]


async def test_events_are_deleted_in_steps(
    backend: RecordBackend,
    store: DictStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law 12: after ``stream_ttl`` nothing remains of a stream, also of a dead letter and of a task that is listed."""
    monkeypatch.setattr(event_streams, "_READ", 3)
    settings = QueueSettings(stream_ttl=9, keep_ended=DAY)
    await backend.control.configure("k", settings)
    await backend.publisher.publish(Task(key="k", id="done"), Task(key="k", id="dead"))
    subscription = backend.subscribe(["k"], "w")
    done, dead = (await subscription.receive(2, 0)).deliveries
    await stream(backend, done, 30)
    await stream(backend, dead, 30)
    await subscription.ack(done)
    await subscription.dead_letter(dead, "bad")
    await clock.advance(9)
    passes = 1
    while (await backend.control.maintain()).behind is not None:
        passes += 1
    assert passes > 1
    assert [name.partition(" ")[0] for name in store.disk.links] == ["keeps"]
    assert await names(backend) == ["done"]
    await backend.dead_letters.redrive("k")
    await stream(backend, await delivered(backend), 1)
    page = await backend.streams.events("k", "dead")
    assert page is not None
    assert [each.id for each in page.events] == ["1-1", "1-2"]


async def test_needed_tasks_hide_no_others(
    backend: RecordBackend, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 7, U18: tasks beyond ``keep_ended_most`` go, although older ones must be kept for their results."""
    monkeypatch.setattr(kept_tasks, "_LOOKED_AT", 2)
    settings = QueueSettings(dedupe_window=1, result_ttl=DAY, keep_ended=DAY, keep_ended_most=4)
    await backend.control.configure("k", settings)
    await backend.publisher.publish(*(Task(key="k", id=f"t{n}") for n in range(8)))
    subscription = backend.subscribe(["k"], "w")
    for delivery in (await subscription.receive(8, 0)).deliveries:
        await subscription.ack(delivery, results=[b"1" if delivery.task.id < "t3" else None])
    await clock.advance(1)
    for _ in range(4):
        await backend.control.maintain()
    assert await names(backend) == ["t0", "t1", "t2", "t7"]


async def test_deleted_records_are_counted(
    backend: RecordBackend, store: DictStore, clock: ManualClock
) -> None:
    """U18: the counters say how many ended tasks have records, whatever takes the place of one."""
    settings = QueueSettings(dedupe_window=1, result_ttl=1, keep_ended=9, index=("user",))
    await backend.control.configure("k", settings)
    for _ in range(3):
        task = Task(key="k", id="t", tags=("user:1",))
        assert (await backend.publisher.publish(task))[0].status is Published.ACCEPTED
        await backend.subscribe(["k"], "w").ack(await delivered(backend))
        await backend.publisher.schedule_retry(task, clock.now())
        await backend.subscribe(["k"], "w").ack(await delivered(backend))
        await clock.advance(2)
    await backend.publisher.publish(Task(key="k", id="gone"))
    assert await backend.control.cancel("k", "gone")
    for seconds in (1, 8, 1):
        counters, rows = Counter[str](), Counter(row.state for row in store.disk.rows.values())
        for (_, name), number in store.disk.counters.items():
            counters[name] += number
        for state in ENDED:
            assert rows[state] == counters[state] - counters[f"removed_{state}"]
        await clock.advance(seconds)
        await backend.control.maintain()
    assert not store.disk.rows
    assert [name for name in store.disk.links if name.startswith("tag")] == []


async def test_a_deleted_queue_remembers_no_replacement(backend: RecordBackend) -> None:
    """Law 7: the id of a publish that replaced another one's contents is forgotten with its queue."""
    unique = UniqueKey(key="u", on_conflict="replace")
    tasks = [Task(key="k", id=name, unique=unique) for name in ("one", "two")]
    answers = await backend.publisher.publish(*tasks)
    assert [each.status for each in answers] == [Published.ACCEPTED, Published.REPLACED]
    await backend.control.purge("k")
    await backend.control.delete("k")
    (answer,) = await backend.publisher.publish(tasks[1])
    assert answer.status is Published.ACCEPTED
