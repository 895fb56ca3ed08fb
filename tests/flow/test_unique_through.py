"""Unique keys in sharded queues, across a change of the number of shards, and during a migration (U12)."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.errors import InvalidInput
from taskqueue_core.migration import rollback, start
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_memory import MemoryBackend
from tests.clock import LoopClock
from tests.flow.pairs import ACCEPTED, DUPLICATE, KEY, pair, take
from tests.flow.test_shards import shard

pytestmark = pytest.mark.fast_clock

REPLACED = Published.REPLACED


def task(task_id: str, key: str = "k", **fields: object) -> Task:
    """Return a task with a unique key."""
    unique = UniqueKey(key=key, **fields)  # type: ignore[arg-type] # checked by the constructor
    return Task.of(KEY, task_id, id=task_id, unique=unique)


async def offer(backend: object, *tasks: Task) -> list[tuple[Published, str | None]]:
    """Publish tasks; return the status and the id of the holder of each answer."""
    answers: tuple[Confirmation, ...] = await backend.publisher.publish(*tasks)  # type: ignore[attr-defined]
    assert [answer.task_id for answer in answers] == [each.id for each in tasks]
    return [(answer.status, answer.existing_id) for answer in answers]


async def test_equal_keys_meet_in_one_shard() -> None:
    """A16, U12: tasks with equal keys are in one shard, so one of them is stored; other keys are spread."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(backend, 4)
    answers = await asyncio.gather(
        *(offer(backend, task(f"t{n}-{m}", f"k{n}")) for m in range(5) for n in range(20))
    )
    assert [status for ((status, _),) in answers].count(ACCEPTED) == 20
    assert (await backend.control.ledger(KEY)).published == 20
    taken = await take(backend.subscribe([KEY], "w"), 20)
    assert len({delivery.shard for delivery in taken}) == 4
    (answer,) = await offer(backend, task("new", "k3", on_conflict="replace"))
    assert answer == (ACCEPTED, None)
    (answer,) = await offer(backend, task("newer", "k3", on_conflict="replace"))
    assert answer == (REPLACED, "new")


async def test_with_an_ordering_key() -> None:
    """A16, U12: in a queue with several shards, a task with both keys is refused before anything is stored."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    both = Task(key=KEY, id="both", ordering_key="e", unique=UniqueKey(key="k"))
    assert await offer(backend, both) == [(ACCEPTED, None)]
    await shard(backend, 2)
    with pytest.raises(InvalidInput, match="several") as error:
        await offer(backend, task("t1", "other"), both)
    assert error.value.field == "unique"
    assert (await backend.control.ledger(KEY)).published == 1


async def test_keys_are_held_across_a_change_of_shards() -> None:
    """A16, U12: a key that a task of an earlier shard holds is held; a waiting task there is replaced there."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    keys = [f"k{n}" for n in range(12)]
    await offer(backend, *(task(f"first-{key}", key) for key in keys[:4]))
    await shard(backend, 3)
    await offer(backend, *(task(f"second-{key}", key) for key in keys[4:8]))
    await shard(backend, 5)
    holders = [f"first-{key}" for key in keys[:4]] + [f"second-{key}" for key in keys[4:8]]
    kept = await offer(backend, *(task(f"third-{key}", key) for key in keys))
    assert kept == [(DUPLICATE, holder) for holder in holders] + [(ACCEPTED, None)] * 4
    replacing = [task(f"new-{key}", key, on_conflict="replace") for key in keys[:8]]
    for _ in range(2):  # the ids are remembered there, too
        assert await offer(backend, *replacing) == [(REPLACED, holder) for holder in holders]
    assert (await backend.control.ledger(KEY)).published == 12
    subscription = backend.subscribe([KEY], "w")
    running = await take(subscription, 4)
    beside = task("beside", "k0", on_conflict="replace")
    assert await offer(backend, beside) == [(ACCEPTED, None)]
    values = {each.task.id: each.task.value() for each in running}
    await subscription.ack(*running)
    while len(values) < 13:
        (delivery,) = await take(subscription, 1)
        values[delivery.task.id] = delivery.task.value()
        await subscription.ack(delivery)
    assert values == {
        **{holder: f"new-{key}" for holder, key in zip(holders, keys[:8], strict=True)},
        **{f"third-{key}": f"third-{key}" for key in keys[8:]},
        "beside": "beside",
    }
    assert await offer(backend, *replacing) == [(REPLACED, holder) for holder in holders]


async def test_an_id_counts_before_a_key() -> None:
    """A16, A20, U12: a task with a known id gets the answer of its id, though a task elsewhere holds its key."""
    sharded = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(sharded, 4)
    async with pair() as two:
        for backend in (two.both, sharded):
            await offer(backend, task("holder", "k"))
            await (start(backend) if backend is two.both else shard(backend, 1))
            await offer(backend, task("t1", "v"))
            again = Task(key=KEY, id="t1", unique=UniqueKey(key="k", on_conflict="replace"))
            assert await offer(backend, again) == [(Published.CONFLICT, None)]
            subscription = backend.subscribe([KEY], "w")
            for name in ("holder", "t1"):
                (delivery,) = await take(subscription, 1)
                assert delivery.task.value() == name
                await subscription.ack(delivery)


async def test_keys_are_held_across_a_migration() -> None:
    """A20, U12: while tasks are on both sides, a key is held on one of them, in both directions."""
    async with pair() as two:
        await offer(two.both, task("old-a", "a"), task("old-b", "b"))
        await start(two.both)
        assert await offer(two.both, task("x", "a"), task("new-c", "c"), task("y", "c")) == [
            (DUPLICATE, "old-a"), (ACCEPTED, None), (DUPLICATE, "new-c"),
        ]  # fmt: skip
        (refused,) = await two.both.publisher.publish(task("x", "b", on_conflict="refuse"))
        assert (refused.code, refused.existing_id) == (Refusal.NOT_UNIQUE, "old-b")
        new = task("new-b", "b", on_conflict="replace")
        for _ in range(2):
            assert await offer(two.both, new) == [(REPLACED, "old-b")]
        assert (await two.both.control.ledger(KEY)).published == 3
        subscription = two.both.subscribe([KEY], "worker")
        taken = {each.task.id: each for each in await take(subscription, 3)}
        assert taken["old-b"].task.value() == "new-b"
        await subscription.ack(taken["old-a"])
        assert await offer(two.both, task("x", "a")) == [(ACCEPTED, None)]
        assert await two.where("x", "old-b", "new-c") == ["n", "o", "n"]
        await rollback(two.both)
        assert await offer(two.both, task("z", "a"), task("z2", "b"), task("z3", "c")) == [
            (DUPLICATE, "x"), (DUPLICATE, "old-b"), (DUPLICATE, "new-c"),
        ]  # fmt: skip
