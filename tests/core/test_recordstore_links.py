"""`RecordBackend`: a blocked task looks at its parents again every hour, because notes and lines may be lost."""

from __future__ import annotations

import pytest

from taskqueue_core.after import After, TaskRef
from taskqueue_core.capabilities import LineKind, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer.carrier import carry
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.recordstore import RecordBackend
from taskqueue_core.tasks import State, Task
from tests.core.dict_store import DictStore, Disk

HOUR = 3600


@pytest.fixture
def store() -> DictStore:
    """The store below the backend."""
    return DictStore(Disk())


@pytest.fixture
def backend(clock: ManualClock, store: DictStore) -> RecordBackend:
    """A backend on an empty store."""
    return RecordBackend("dict", store, clock, durable=True)


def after(*parents: str, key: str = "k") -> After:
    """Return what a task waits for."""
    return After(tasks=tuple(TaskRef(key, parent) for parent in parents))


def lose(store: DictStore, kind: str) -> int:
    """Delete all links of a kind; return how many there were."""
    with store.transaction(BackendUnavailable):
        names = [name for name, _ in store.links(f"{kind} ", f"{kind}!", 9999)]
        for name in names:
            store.drop_link(name)
    return len(names)


async def states(backend: RecordBackend, *ids: str) -> list[State | None]:
    """Return the states of tasks."""
    found = await backend.control.statuses("k", *ids)
    return [None if status is None else status.state for status in found]


async def test_lost_notes(backend: RecordBackend, store: DictStore, clock: ManualClock) -> None:
    """U16, B1: a child whose notes were lost is released, or held, an hour after it was published, not before."""
    await backend.control.configure("k", QueueSettings(dedupe_window=2 * HOUR))
    await backend.publisher.publish(*(Task(key="k", id=name) for name in ("done", "dead", "gone")))
    await backend.publisher.publish(
        Task(key="k", id="one", after=after("done")),
        Task(key="k", id="held", after=after("done", "dead")),
        Task(key="k", id="cancelled", after=after("done", "gone")),
    )
    assert lose(store, "note") == 5
    async with backend.subscribe(["k"], "w") as subscription:
        done, dead, _ = (await subscription.receive(3, 0)).deliveries
        await subscription.ack(done)
        await subscription.dead_letter(dead, "bad")
    await backend.control.cancel("k", "gone")
    children = "one", "held", "cancelled"
    for seconds in (0, HOUR - 1):
        await clock.advance(seconds)
        await backend.control.maintain()
        assert await states(backend, *children) == [State.BLOCKED] * 3
    await clock.advance(1)
    await backend.control.maintain()
    assert await states(backend, *children) == [State.WAITING, State.BLOCKED, State.CANCELLED]
    (status,) = await backend.control.statuses("k", "held")
    assert status is not None
    assert status.held_by == status.waits_for == (TaskRef("k", "dead"),)
    assert (await backend.control.stats("k")).blocked_on_dead == 1
    await backend.dead_letters.discard("k")
    assert await states(backend, "held") == [State.CANCELLED]


async def test_lost_lines(backend: RecordBackend, store: DictStore, clock: ManualClock) -> None:
    """U16: a child whose lines were lost registers again, with one line per parent until it was carried."""
    await backend.publisher.publish(Task(key="k", id="child", after=after("a", "b", key="far")))
    assert lose(store, "line") == 2
    for _ in range(3):
        await clock.advance(HOUR)
        await backend.control.maintain()
        lines = await backend.dependencies.lines(9)
        assert [(line.kind, line.parent.task_id) for line in lines] == [
            (LineKind.REGISTER, "a"),
            (LineKind.REGISTER, "b"),
        ]
    assert lose(store, "line") == 2  # also those with which it has asked
    await clock.advance(HOUR)
    await backend.control.maintain()
    assert len(await backend.dependencies.lines(9)) == 2
    await backend.dependencies.confirm(*await backend.dependencies.lines(9))
    await clock.advance(HOUR)
    await backend.control.maintain()
    assert len(await backend.dependencies.lines(9)) == 2
    await carry(backend.dependencies)
    assert await states(backend, "child") == [State.CANCELLED]


async def test_many_parents(backend: RecordBackend, store: DictStore, clock: ManualClock) -> None:
    """U16: tasks with many parents ask in several steps, and all of them ask."""
    await backend.control.configure("k", QueueSettings(dedupe_window=2 * HOUR))
    names = [f"p{number}" for number in range(600)]
    await backend.publisher.publish(*(Task(key="k", id=name) for name in names))
    children = "x", "y", "z"
    for child in children:
        await backend.publisher.publish(Task(key="k", id=child, after=after(*names)))
    assert lose(store, "note") == 1800
    await backend.control.cancel("k", names[-1])
    await clock.advance(HOUR)
    maintained = await backend.control.maintain()
    assert maintained.behind is None
    assert await states(backend, *children) == [State.CANCELLED] * 3


async def test_lost_counts(backend: RecordBackend, store: DictStore, clock: ManualClock) -> None:
    """U16: a closed batch asks again for the counts of its members, with one line until it was carried."""
    batch = TaskRef("k", "batch")
    await backend.publisher.publish(Task(key="k", id="batch", batch=batch))
    await backend.publisher.publish(Task(key="k", id="member", batch=batch))
    await backend.dependencies.close(batch)
    await carry(backend.dependencies)
    await backend.control.cancel("k", "member")
    for _ in range(2):
        assert lose(store, "line") == 1
        await clock.advance(HOUR)
        await backend.control.maintain()
        (line,) = await backend.dependencies.lines(9)
        assert line.kind is LineKind.CLOSE
    assert await states(backend, "batch") == [State.BLOCKED]
    await carry(backend.dependencies)
    assert await states(backend, "batch") == [State.CANCELLED]
