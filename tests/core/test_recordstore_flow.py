"""How `RecordBackend` handles stalled deliveries and publishers that wait for room, beyond the conformance kit."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, InvalidInput
from taskqueue_core.recordstore import RecordBackend
from taskqueue_core.tasks import State, Task
from tests.core.dict_store import DictStore, Disk

HUNG = QueueSettings(max_processing_time=10, max_losses=1)


@pytest.fixture
def store() -> DictStore:
    """The store below the backend."""
    return DictStore(Disk())


@pytest.fixture
def backend(clock: ManualClock, store: DictStore) -> RecordBackend:
    """A backend on an empty store."""
    return RecordBackend("dict", store, clock, durable=True)


async def test_who_waits_gets_what_hung(backend: RecordBackend, clock: ManualClock) -> None:
    """C18: a waiting receive gets a stalled task as soon as its time limit has passed, without a maintenance pass."""
    await backend.control.configure("k", HUNG)
    waiting = asyncio.create_task(backend.subscribe(["k"], "other").receive(1, None))
    await asyncio.sleep(0)
    await backend.publisher.publish(Task(key="k", id="t"))
    (first,) = (await waiting).deliveries
    waiting = asyncio.create_task(backend.subscribe(["k"], "w").receive(1, None))
    await asyncio.sleep(0)
    await clock.advance(5)
    await backend.control.progress(first, 0.5)
    await clock.advance(9.9)
    assert not waiting.done()
    await clock.advance(0.1)
    (again,) = (await asyncio.wait_for(waiting, 30)).deliveries
    assert (again.losses, again.task.id) == (1, "t")


@pytest.mark.parametrize(("deadline", "end"), [(10, State.EXPIRED), (11, State.WAITING)])
async def test_a_deadline_before_it(
    backend: RecordBackend, clock: ManualClock, deadline: float, end: State
) -> None:
    """C18, law 8: if a task's deadline passes no later than its processing limit, the task expires and is not lost."""
    await backend.control.configure("k", HUNG)
    await backend.publisher.publish(Task(key="k", id="t", deadline=clock.now() + deadline))
    await backend.subscribe(["k"], "w").receive(1, 0)
    await clock.advance(10)
    await backend.publisher.publish(Task(key="k"))
    await backend.control.maintain()
    (status,) = await backend.control.statuses("k", "t")
    assert status is not None
    assert status.state is end
    assert (await backend.control.stats("k")).lost == (end is State.WAITING)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (QueueSettings(order=Order.FAIR), "order"),
        (QueueSettings(floor_share=0.1), "floor_share"),
        (QueueSettings(bound_to=("other",)), "bound_to"),
    ],
)
async def test_what_it_does_not_keep(
    backend: RecordBackend, settings: QueueSettings, field: str
) -> None:
    """GOAL-AB: settings for fair order, a floor share or bound queues are refused by name, and nothing changes."""
    with pytest.raises(InvalidInput) as caught:
        await backend.control.configure("k", settings)
    assert caught.value.field == field
    assert (await backend.control.settings("k")).version == 0


async def test_the_room_signal_is_sent_for_new_room(
    backend: RecordBackend, store: DictStore
) -> None:
    """B13: a room signal is sent after a first delivery, a cancel, a change of settings and a failed transaction.

    It is sent only to waiters for that queue.
    """

    async def rung() -> bool:
        waiting = asyncio.create_task(signal.wait(60))
        for _ in range(3):
            await asyncio.sleep(0)
        done = waiting.done()
        waiting.cancel()
        return done

    await backend.control.configure("k", QueueSettings(capacity=2))
    await backend.publisher.publish(Task(key="k", id="a"), Task(key="other", id="b"))
    consumer = backend.subscribe(["k", "other"], "w")
    async with backend.publisher.room_signal("k", "more") as signal:
        assert not await rung()
        (first, second) = (await consumer.receive(9, 0)).deliveries
        assert await rung()
        assert not await rung()
        await consumer.ack(first, second)
        assert not await rung(), "it took no room any more"
        await backend.publisher.publish(Task(key="k", id="c"), Task(key="other", id="d"))
        assert not await rung()
        await backend.control.cancel("other", "d")
        assert not await rung()
        await backend.control.cancel("k", "c")
        assert await rung()
        await backend.control.configure("k", QueueSettings(version=1))
        assert await rung()
        await backend.publisher.publish(Task(key="k", id="e"))
        store.failing = {"answer"}
        with pytest.raises(BackendUnavailable):
            await consumer.receive(9, 0)
        store.failing = set()
        assert await rung()
    await consumer.receive(9, 0)
    assert not await rung(), "it is closed"
    await asyncio.wait_for(signal.wait(0.001), 30)
