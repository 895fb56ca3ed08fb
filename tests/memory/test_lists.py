"""Lists of tasks that are kept sorted: they stay right whatever changes, cost little, and are dropped."""

from __future__ import annotations

from random import Random

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Delivery, State, Task
from taskqueue_memory import MemoryBackend, sorted_lists
from taskqueue_memory.sorted_lists import SortedLists


async def names(backend: MemoryBackend, state: State, *, newest: bool = False) -> list[str]:
    """Return the ids on all pages of a list."""
    found, after = list[str](), None
    while True:
        page = await backend.listing.tasks("k", state=state, after=after, limit=7, newest=newest)
        found += [task.task_id for task in page.tasks]
        after = page.next
        if after is None:
            return found


@pytest.fixture
def sorts(monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """The states of the lists that were sorted since the test began."""
    found, sort = list[State](), SortedLists._sort

    async def counted(lists: SortedLists, state: State) -> object:
        found.append(state)
        return await sort(lists, state)

    monkeypatch.setattr(SortedLists, "_sort", counted)
    return found


@pytest.mark.parametrize("changes", [3, 25, 100_000])
async def test_lists_follow_all_changes(  # noqa: C901 - one branch for each call that changes tasks
    changes: int,
    backend: MemoryBackend,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Law 11: after any changes, a list that was kept is the same as one that is sorted anew."""
    monkeypatch.setattr(sorted_lists, "_CHANGES", changes)
    await backend.control.configure("k", QueueSettings(dedupe_window=30, max_losses=0))
    subscription, random, held = backend.subscribe(["k"], "w"), Random(changes), list[Delivery]()

    async def publish() -> None:
        number, chosen = random.randrange(10_000), random.random()
        await backend.publisher.publish(
            Task(
                key="k",
                id=f"t{number}",
                priority=random.choice((0, 5, 9)),
                ordering_key=random.choice(("a", "b")) if chosen < 0.3 else None,
                not_before=clock.now() + random.randrange(1, 40) if chosen > 0.7 else None,
            )
        )

    async def receive() -> None:
        held.extend((await subscription.receive(2, 0)).deliveries)

    async def settle() -> None:
        if not held:
            return
        delivery = held.pop(random.randrange(len(held)))
        match random.randrange(5):
            case 0 | 1:
                await subscription.ack(delivery)
            case 2:
                await subscription.redeliver(delivery, lost=random.random() < 0.3)
            case 3:
                await subscription.dead_letter(delivery, "bad")
            case _:
                await backend.publisher.schedule_retry(
                    delivery.task, clock.now() + 5, settles=delivery
                )

    async def operate() -> None:
        state = random.choice((State.WAITING, State.SCHEDULED, State.DEAD))
        listed = await names(backend, state)
        if not listed:
            return
        name = random.choice(listed)
        if state is State.DEAD:
            await backend.dead_letters.redrive("k", name)
        elif random.random() < 0.5:
            await backend.control.cancel("k", name)
        else:
            await backend.control.reschedule("k", name, clock.now() + random.randrange(20))

    async def wait() -> None:
        await clock.advance(random.randrange(1, 5))
        await backend.control.maintain()

    actions = (publish, publish, publish, receive, settle, settle, operate, wait)
    shown = 0
    for number in range(300):
        await random.choice(actions)()
        if number % 5:
            continue
        kept = [await names(backend, state) for state in State]
        reversed_lists = [await names(backend, state, newest=True) for state in State]
        for lists in backend.listing._lists.values():
            lists._restart()  # the next pages sort again
        afresh = [await names(backend, state) for state in State]
        assert kept == afresh
        assert reversed_lists == [each[::-1] for each in afresh]
        shown = sum(map(len, kept))
    assert shown > 20


async def test_pages_sort_once(
    backend: MemoryBackend, clock: ManualClock, sorts: list[State]
) -> None:
    """Law 11: the pages of a list sort it once; before the first one, and after a minute, no changes are noted."""
    queue = backend._store.queue("k")
    await backend.publisher.publish(*(Task(key="k", id=f"t{n:03}") for n in range(100)))
    assert queue.changed is None
    for seconds in (0, 59, 59):
        await clock.advance(seconds)
        assert len(await names(backend, State.WAITING)) == 100
        assert queue.changed is not None
    assert sorts == [State.WAITING]
    await clock.advance(60)
    assert queue.changed is None
    assert len(await names(backend, State.WAITING)) == 100
    assert len(sorts) == 2


async def test_noted_changes_are_bounded(
    backend: MemoryBackend, sorts: list[State], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 11: after more changes than are noted, a list is sorted again, and is complete."""
    monkeypatch.setattr(sorted_lists, "_CHANGES", 50)
    queue = backend._store.queue("k")
    await backend.publisher.publish(Task(key="k"))
    assert len(await names(backend, State.WAITING)) == 1
    await backend.publisher.publish(*(Task(key="k") for _ in range(500)))
    assert queue.changed is not None
    assert len(queue.changed) == 50
    assert len(await names(backend, State.WAITING)) == 501
    assert len(sorts) == 2
