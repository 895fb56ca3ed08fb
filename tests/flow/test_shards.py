"""Shards: a queue over several partitions, whose number may change while it is in use (A16, A18, A19; fault D7)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import InvalidInput, LeaseLost, SettingsConflict
from taskqueue_core.migration import MigratingBackend, start
from taskqueue_core.queue_settings import change_settings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.sharding.generations import Generation, Shard, shard_of
from taskqueue_core.tasks import Delivery, Published, Refusal, Settled, State, Task
from taskqueue_memory import MemoryBackend
from tests.clock import LoopClock
from tests.flow.pairs import take

pytestmark = pytest.mark.fast_clock

KEY = "work"
ACCEPTED, DUPLICATE = Published.ACCEPTED, Published.DUPLICATE


async def shard(backend: Any, number: int, key: str = KEY) -> QueueSettings:
    """Change the number of shards of a queue."""
    return await change_settings(
        backend.control, key, lambda found: found.model_copy(update={"shards": number})
    )


async def publish(backend: Any, *ids: str, **fields: Any) -> list[Published]:
    """Publish tasks with these ids and return the status of each."""
    told = await backend.publisher.publish(*[Task(key=KEY, id=name, **fields) for name in ids])
    assert all(one.key == KEY for one in told)
    return [one.status for one in told]


async def drain(subscription: Any, number: int) -> set[str]:
    """Receive and ack the given number of tasks; return their ids."""
    found: set[str] = set()
    while len(found) < number:
        (delivery,) = await take(subscription, 1)
        await subscription.ack(delivery)
        found.add(delivery.task.id)
    return found


def names(number: int) -> list[str]:
    """Return this many task ids."""
    return [f"t{n}" for n in range(number)]


async def test_spread_and_gathered() -> None:
    """A16: tasks are distributed over the shards by id, and every operation finds them there."""
    inner = MemoryBackend(clock=LoopClock())
    backend = ShardedBackend(inner)
    assert (await shard(backend, 4)).shards == 4
    assert await publish(backend, *names(40)) == [ACCEPTED] * 40
    assert await publish(backend, *names(40)) == [DUPLICATE] * 40
    places = Generation(1, 4).shard_keys(KEY)
    spread = [(await inner.control.ledger(place)).waiting for place in places]
    assert sum(spread) == 40
    assert min(spread) >= 3
    assert await backend.control.queues() == (KEY,)
    subscription = backend.subscribe([KEY], "worker")
    taken = await take(subscription, 40)
    assert {one.task.id for one in taken} == set(names(40))
    assert all(one.shard == shard_of(one.task, 4) for one in taken)
    assert {one.task.key for one in taken} == {KEY}
    assert await subscription.ack(*taken[:10], results=[b"1"] * 10) == (Settled.OK,) * 10
    with pytest.raises(LeaseLost):
        await subscription.redeliver(taken[0])
    assert await subscription.dead_letter(taken[10], "bad") is Settled.OK
    await backend.publisher.schedule_retry(taken[11].task, inner.now() + 60, settles=taken[11])
    assert await backend.control.progress(taken[12], 0.5)
    other = backend.subscribe([KEY], "worker")
    (adopted,) = await other.adopt(taken[13].receipt)
    assert adopted is not None
    assert (adopted.task, adopted.receipt) == (taken[13].task, taken[13].receipt)
    lost = asyncio.create_task(subscription.revoked())
    assert await backend.control.cancel(KEY, taken[14].task.id)
    assert await lost == (taken[14].receipt,)
    ids = [taken[place].task.id for place in (0, 10, 11, 12, 14)]
    told = await backend.control.statuses(KEY, *ids)
    assert [one and (one.key, one.state) for one in told] == [
        (KEY, state)
        for state in (State.DONE, State.DEAD, State.SCHEDULED, State.IN_FLIGHT, State.CANCELLED)
    ]
    assert await backend.control.results(KEY, ids[0], "unknown") == (b"1", None)
    assert [one.task.key for one in await backend.dead_letters.list(KEY)] == [KEY]
    assert await backend.dead_letters.redrive(KEY) == 1
    assert await backend.control.purge(KEY) == 2
    ledger = await backend.control.ledger(KEY)
    assert ledger.balanced
    assert (ledger.published, ledger.done, ledger.cancelled) == (40, 10, 3)
    assert (await backend.control.stats(KEY)).delivered == 40
    (worker,) = await backend.control.workers()
    assert worker.keys == (KEY,)
    await backend.aclose()


async def test_one_entity_one_shard() -> None:
    """A16: tasks with the same ordering key are in the same shard, whatever their ids."""
    tasks = [Task(key=KEY, id=name, ordering_key="entity") for name in names(20)]
    assert len({shard_of(task, 16) for task in tasks}) == 1
    assert shard_of(Task(key=KEY, id="entity"), 16) == shard_of(tasks[0], 16)
    assert shard_of(Task(key=KEY, id="t1"), 1000) == 457, (
        "the hash must not change: it decides which shard knows an id"
    )


async def test_the_number_changes() -> None:
    """Fault D7: when the shard count changes, old shards close, still detect their ids, and drain first (law 7)."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await publish(backend, "a", "b")
    subscription = backend.subscribe([KEY], "worker")
    assert len((await subscription.receive(1, 0)).deliveries) == 1
    for number in (4, 8, 1, 3):
        assert (await shard(backend, number)).shards == number
        fresh = [f"{number}.{name}" for name in names(10)]
        assert await publish(backend, *fresh) == [ACCEPTED] * 10
        assert await publish(backend, "a", "b", *fresh) == [DUPLICATE] * 12
    found = await backend.control.settings(KEY)
    assert (found.shards, found.moved_to, found.version) == (3, None, 4)
    ledger = await backend.control.ledger(KEY)
    assert (ledger.published, ledger.waiting) == (42, 41)
    await backend.aclose()


async def test_another_process_learns_it() -> None:
    """Fault D7: other processes follow a change of the shard count; no id is stored twice and no task is missed."""
    inner = MemoryBackend(clock=LoopClock())
    one, two = ShardedBackend(inner), ShardedBackend(inner)
    subscription = two.subscribe([KEY], "worker")
    assert await publish(two, "a") == [ACCEPTED]
    await subscription.ack(*await take(subscription, 1))
    waiting = asyncio.create_task(take(subscription, 6))
    await shard(one, 4)
    assert await publish(one, "b", "c", "d") == [ACCEPTED] * 3
    assert await publish(two, "a", "b", "c", "e", "f", "g") == [
        *[DUPLICATE] * 3,
        *[ACCEPTED] * 3,
    ]
    assert {delivery.task.id for delivery in await waiting} == set("bcdefg")
    assert (await two.control.ledger(KEY)).published == 7
    await one.aclose()


async def test_another_call_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A16: a task is published again if another call has learnt of the new shards before a closed one refused it."""
    store = MemoryBackend()
    one, stale = ShardedBackend(store), ShardedBackend(store)
    await stale.publisher.publish(Task(key="q", id="first"))
    await one.control.configure("q", QueueSettings(shards=3))
    publish = store.publisher.publish

    async def and_learn(*tasks: Task) -> Any:
        answers = await publish(*tasks)
        await stale.generations.read("q")
        return answers

    monkeypatch.setattr(store.publisher, "publish", and_learn)
    (answer,) = await stale.publisher.publish(Task(key="q", id="second"))
    assert answer.status is Published.ACCEPTED


@pytest.mark.parametrize("seed", range(3))
async def test_order_per_entity(seed: int) -> None:
    """Fault D7: while the shard count changes under load, tasks of one key run one by one and in order (law 4)."""
    rng = random.Random(seed)
    inner = MemoryBackend(clock=LoopClock())
    backend = ShardedBackend(inner)
    seen: dict[str, list[int]] = {}
    running: Counter[str] = Counter()
    done = 0

    async def work(name: str) -> None:
        nonlocal done
        async with backend.subscribe([KEY], name) as subscription:
            while done < 150:
                for delivery in (await subscription.receive(3, 0.05)).deliveries:
                    entity = str(delivery.task.ordering_key)
                    running[entity] += 1
                    assert running[entity] == 1, f"two tasks of {entity} at a time"
                    await asyncio.sleep(0)
                    running[entity] -= 1
                    if rng.random() < 0.1:
                        await subscription.redeliver(delivery)
                        continue
                    seen.setdefault(entity, []).append(delivery.task.value())
                    await subscription.ack(delivery)
                    done += 1

    workers = [asyncio.create_task(work(f"w{n}")) for n in range(3)]
    for number in range(150):
        if number % 40 == 20:
            await shard(backend, rng.choice((1, 2, 4, 5, 8)))
        task = Task.of(KEY, number, id=f"t{number}", ordering_key=f"e{number % 7}")
        await backend.publisher.publish(task)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await asyncio.gather(*workers)
    assert sum(len(some) for some in seen.values()) == 150
    assert all(some == sorted(some) for some in seen.values()), seen
    assert (await backend.control.ledger(KEY)).done == 150
    await backend.aclose()


async def test_the_same_shard_first() -> None:
    """A18, A19: a consumer prefers the shard it was last served from, is told of a change, and no shard is starved."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(backend, 4)
    await publish(backend, *names(200))
    subscription = backend.subscribe([KEY], "worker")
    taken: list[Delivery] = []
    for _ in range(100):
        taken += await take(subscription, 1)
    changes = sum(one.shard_changed for one in taken)
    shards = [one.shard for one in taken]
    assert not taken[0].shard_changed
    assert all(
        after.shard_changed == (after.shard != before.shard)
        for before, after in itertools.pairwise(taken)
    )
    assert changes <= 15, shards
    assert set(shards) == {0, 1, 2, 3}
    others = await take(subscription, 100)
    assert len({one.task.id for one in taken + others}) == 200
    await backend.aclose()
    assert (await backend.control.ledger(KEY)).waiting == 200


@pytest.mark.parametrize(
    "limit",
    [
        {"capacity": 1},
        {"max_inflight": 1},
        {"rate_limit": RateLimit(max_tokens=1)},
        {"order": Order.FAIR},
        {"floor_share": 0.1},
        {"bound_to": ("other",)},
    ],
)
async def test_limits_need_one_partition(limit: dict[str, Any]) -> None:
    """A16, F1: limits that concern the whole queue exclude shards and vice versa; errors name the setting (law 5)."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    (name,) = limit
    with pytest.raises(ValueError, match=f"a queue with the setting {name} cannot have shards"):
        QueueSettings(shards=2, **limit)
    loose = QueueSettings().model_copy(update={"shards": 2, **limit})
    with pytest.raises(InvalidInput, match=name):
        await backend.control.configure(KEY, loose)
    await shard(backend, 2)
    sharded = await backend.control.settings(KEY)
    with pytest.raises(InvalidInput, match=name):
        await backend.control.configure(KEY, sharded.model_copy(update=limit))
    back = await backend.control.configure(KEY, sharded.model_copy(update={"shards": 1, **limit}))
    assert (await backend.control.settings(KEY)) == back
    await backend.aclose()


async def test_what_cannot_be_sharded() -> None:
    """A16: shard names are no queue names; queues with long names or that receive copies cannot be sharded (D9)."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    inside = Generation(1, 4).shard_key(KEY, 2)
    assert Shard.read(inside) == (KEY, 2, (1, 4))
    with pytest.raises(InvalidInput):
        backend.subscribe([inside], "worker")
    with pytest.raises(InvalidInput):
        await backend.publisher.publish(Task(key=inside))
    with pytest.raises(InvalidInput):
        await backend.control.configure(inside, QueueSettings())
    with pytest.raises(InvalidInput, match="characters"):
        await shard(backend, 2, "x" * 190)
    await backend.control.configure("topic", QueueSettings(bound_to=(KEY,)))
    with pytest.raises(InvalidInput, match="topic"):
        await shard(backend, 2)
    with pytest.raises(InvalidInput, match="shards"):
        await MemoryBackend(clock=LoopClock()).control.configure(KEY, QueueSettings(shards=2))


async def test_copies_go_to_whole_queues() -> None:
    """D9: a queue may be bound to a queue that has one shard again, but not to one with several shards."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(backend, 2)
    with pytest.raises(InvalidInput, match="bound_to"):
        await backend.control.configure("topic", QueueSettings(bound_to=(KEY, "other")))
    await shard(backend, 1)
    told = await backend.control.configure("topic", QueueSettings(bound_to=(KEY, "other")))
    assert (await backend.control.settings("topic")) == told
    assert told.bound_to == (KEY, "other")
    (answer,) = await backend.publisher.publish(Task(key="topic", id="x"))
    assert answer.status is ACCEPTED
    assert (await backend.control.ledger(KEY)).waiting == 1
    subscription = backend.subscribe([KEY], "worker")
    assert await drain(subscription, 1) == {"x"}
    with pytest.raises(InvalidInput, match="topic"):
        await shard(backend, 2)
    await backend.aclose()


async def test_settings_hold_in_every_shard() -> None:
    """F7: a confirmed pause holds in every shard; conflicting settings versions are detected as usual (laws 5, 9)."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    settings = await shard(backend, 3)
    await publish(backend, *names(9))
    paused = await backend.control.configure(KEY, settings.model_copy(update={"paused": True}))
    assert (paused.version, paused.shards) == (2, 3)
    subscription = backend.subscribe([KEY], "worker")
    assert not (await subscription.receive(9, 0)).deliveries
    with pytest.raises(SettingsConflict):
        await backend.control.configure(KEY, settings)
    await shard(backend, 5)
    await publish(backend, *[f"later{n}" for n in range(9)])
    assert not (await subscription.receive(9, 0)).deliveries
    closed = await change_settings(
        backend.control,
        KEY,
        lambda found: found.model_copy(update={"paused": False, "intake_paused": True}),
    )
    assert (closed.paused, closed.intake_paused) == (False, True)
    (told,) = await backend.publisher.publish(Task(key=KEY, id="new"))
    assert told.code is Refusal.INTAKE_PAUSED
    assert len(await drain(subscription, 18)) == 18
    await backend.aclose()


async def test_two_change_it_at_once() -> None:
    """Law 10: two concurrent changes of the shard count take effect one after the other, as separate generations."""
    inner = MemoryBackend(clock=LoopClock())
    processes = [ShardedBackend(inner) for _ in range(3)]
    await asyncio.gather(shard(processes[0], 4), shard(processes[1], 6))
    for number, process in enumerate(processes):
        assert await publish(process, *names(30)) == [DUPLICATE if number else ACCEPTED] * 30
    assert (await processes[2].control.ledger(KEY)).published == 30
    chain = await processes[2].generations.read(KEY)
    assert [generation.number for generation in chain] == list(range(len(chain)))


async def test_shards_migrate() -> None:
    """A16, A20: a queue with shards can be migrated to another store, which then has as many shards of it."""
    clock = ManualClock()
    old, new = (ShardedBackend(MemoryBackend(clock=clock)) for _ in range(2))
    both = MigratingBackend(old, new)
    await shard(old, 3)
    await publish(both, *names(6))
    await start(both)
    assert await publish(both, *names(12)) == [DUPLICATE] * 6 + [ACCEPTED] * 6
    assert (await both.control.settings(KEY)).shards == 3
    async with both.subscribe([KEY], "worker") as subscription:
        taken = await take(subscription, 12)
        assert await subscription.ack(*taken) == (Settled.OK,) * 12
    assert [(await side.control.ledger(KEY)).done for side in (old, new)] == [6, 6]
    (told,) = await old.publisher.publish(Task(key=KEY, id="late"))
    assert told.code is Refusal.MOVED
    await both.aclose()
