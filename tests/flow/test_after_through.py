"""Tasks that wait for others, and batches, in sharded queues and during a migration (U16)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskqueue_core.after import UNKNOWN_PARENT, After, TaskRef
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_letters_of, dependencies_of
from taskqueue_core.consumer.carrier import carry
from taskqueue_core.errors import InvalidInput
from taskqueue_core.migration import (
    MigratingBackend,
    MigrationMode,
    finish,
    rollback,
    start,
    status,
)
from taskqueue_core.migration.routing import OLD
from taskqueue_core.migration.steps import MigrationUnfinished
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_core.tasks import Delivery, Published, Refusal, State, Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_memory import MemoryBackend
from tests.clock import LoopClock
from tests.flow.pairs import KEY, pair, take
from tests.flow.test_shards import shard

pytestmark = pytest.mark.fast_clock

BATCH = TaskRef(KEY, "batch")


def waiting(task_id: str, *parents: str, key: str = KEY, **after: Any) -> Task:
    """Return a task that waits for others of the queue `KEY`."""
    refs = tuple(TaskRef(KEY, parent) for parent in parents)
    return Task(key=key, id=task_id, after=After(tasks=refs, **after))


async def publish(backend: Any, *tasks: Task | str) -> None:
    """Publish tasks, or plain tasks with these ids."""
    made = [Task(key=KEY, id=each) if isinstance(each, str) else each for each in tasks]
    answers = await backend.publisher.publish(*made)
    assert {answer.status for answer in answers} == {Published.ACCEPTED}


async def carry_all(backend: Backend) -> int:
    """Carry lines until there are none that can be carried; return how many are left."""
    while True:
        carried, left = await carry(dependencies_of(backend))
        if not carried:
            return left


async def run(backend: Any, number: int, *keys: str) -> dict[str, Delivery]:
    """Run a number of tasks, one after the other, and return their deliveries by id. The result of each is its id."""
    found: dict[str, Delivery] = {}
    async with backend.subscribe(keys or [KEY], "w") as subscription:
        for _ in range(number):
            (delivery,) = await take(subscription, 1)
            found[delivery.task.id] = delivery
            await subscription.ack(delivery, results=[f'"{delivery.task.id}"'.encode()])
    await carry_all(backend)
    return found


async def state(backend: Backend, task_id: str, key: str = KEY) -> tuple[State, str | None]:
    """Return the state of a task, and the reason of its end."""
    (found,) = await control_of(backend).statuses(key, task_id)
    assert found is not None
    return found.state, found.error


async def test_across_shards() -> None:
    """A16, U16: parents and children in any shards find one another by lines, with results; each runs once."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await publish(backend, "first")
    await shard(backend, 3)
    parents = [f"p{n}" for n in range(12)]
    await publish(
        backend,
        *parents,
        *(waiting(f"c{n}", *parents[n : n + 3], "first", inputs=(0, 3)) for n in range(9)),
        waiting("last", *(f"c{n}" for n in range(9)), when="ended"),
        waiting("elsewhere", "last", key="other", inputs=(0,)),
        waiting("typo", "p0", "none"),
    )
    await carry_all(backend)
    assert await state(backend, "typo") == (State.CANCELLED, UNKNOWN_PARENT)
    await shard(backend, 5)
    assert len({each.shard for each in (await run(backend, 13)).values()}) > 1
    children = await run(backend, 9)
    for n in range(9):
        assert children[f"c{n}"].inputs == (f'"p{n}"'.encode(), b'"first"')
    assert [*await run(backend, 1)] == ["last"]
    (elsewhere,) = (await run(backend, 1, "other")).values()
    assert elsewhere.inputs == (b'"last"',)
    ledger = await backend.control.ledger(KEY)
    assert (ledger.done, ledger.cancelled, ledger.published) == (23, 1, 24)
    assert await dependencies_of(backend).lines(9) == ()


async def test_a_parent_in_shards_that_are_new() -> None:
    """A16, U16: a carrier in a process that does not know the new shards yet cancels no child of a parent there."""
    store = MemoryBackend(clock=LoopClock())
    backend, other = ShardedBackend(store), ShardedBackend(store)
    await publish(other, "a")  # it knows that there are no shards
    await shard(backend, 4)
    await publish(backend, *(f"p{n}" for n in range(8)))
    await publish(backend, *(waiting(f"c{n}", f"p{n}") for n in range(8)))
    await carry_all(other)
    assert (await backend.control.ledger(KEY)).blocked == 8
    await run(backend, 9)
    assert len(await run(backend, 8)) == 8


async def test_dead_letters_of_shards() -> None:
    """A16, U16: a dead letter holds tasks in other shards, and is named as its queue; a redrive lets them go on."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(backend, 4)
    children = [f"c{n}" for n in range(6)]
    await publish(backend, "p", *(waiting(child, "p") for child in children))
    await carry_all(backend)
    subscription: Any = backend.subscribe([KEY], "w")
    await subscription.dead_letter((await take(subscription, 1))[0], "broken")
    await carry_all(backend)
    statuses = await backend.control.statuses(KEY, *children)
    assert {each.held_by for each in statuses if each} == {(TaskRef(KEY, "p"),)}
    await dead_letters_of(backend).redrive(KEY, "p")
    await subscription.close()
    await run(backend, 1)
    assert sorted(await run(backend, 6)) == children


async def test_batches_over_shards() -> None:
    """A16, U16: a batch in a sharded queue counts members of all shards, and ends once; late ones are refused."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(backend, 4)
    members = [Task(key=key, id=f"m{n}", batch=BATCH) for n in range(6) for key in (KEY, "other")]
    await publish(backend, Task(key=KEY, id="batch", batch=BATCH), waiting("then", "batch"))
    await publish(backend, *members[:6])
    await shard(backend, 2)
    await publish(backend, *members[6:])
    assert await dependencies_of(backend).close(BATCH)
    await carry_all(backend)
    (late,) = await backend.publisher.publish(Task(key=KEY, id="late", batch=BATCH))
    assert late.code is Refusal.BATCH_CLOSED
    await run(backend, 11, KEY, "other")
    assert (await state(backend, "batch"))[0] is State.BLOCKED
    await run(backend, 1, KEY, "other")
    assert (await state(backend, "batch"))[0] is State.DONE
    assert [*await run(backend, 1)] == ["then"]
    assert not await dependencies_of(backend).close(BATCH)


async def test_names_of_shards_are_refused() -> None:
    """A16, U16: parents and batches are named by their queues; the name of a shard is refused, and nothing stored."""
    backend = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(backend, 2)
    (name, _) = backend.generations.known(KEY)[-1].shard_keys(KEY)
    ref = TaskRef(name, "p")
    for field, task in (
        ("after.tasks", Task(key=KEY, id="c", after=After(tasks=(ref,)))),
        ("batch", Task(key=KEY, id="c", batch=ref)),
    ):
        with pytest.raises(InvalidInput) as error:
            await backend.publisher.publish(Task(key=KEY, id="sound"), task)
        assert error.value.field == field
    assert (await backend.control.ledger(KEY)).published == 0


@pytest.mark.parametrize("mode", list(MigrationMode))
async def test_across_a_migration(mode: MigrationMode) -> None:
    """A20, U16: tasks of both sides wait for one another; the migration ends once the blocked ones have ended."""
    async with pair(mode) as two:
        await publish(two.both, "old", waiting("old-child", "old"))
        await publish(two.both, "held", waiting("of-held", "held", "new", inputs=(0, 1)))
        await start(two.both)
        await publish(two.both, "new", waiting("new-child", "old", "new", inputs=(1, 0)))
        await publish(two.both, waiting("last", "of-held", "new-child", "old-child"))
        answers = await two.both.publisher.publish(
            waiting("old-child", "old"), Task(key=KEY, id="new")
        )
        assert {answer.status for answer in answers} == {Published.DUPLICATE}
        assert await two.where("old", "old-child", "new", "new-child") == ["o", "o", "n", "n"]
        await carry_all(two.both)
        with pytest.raises(MigrationUnfinished):
            await finish(two.both)
        found: dict[str, Delivery] = {}
        for _ in range(6):
            found |= await run(two.both, 1)
        assert found["of-held"].inputs == (b'"held"', b'"new"')
        assert found["new-child"].inputs == (b'"new"', b'"old"')
        assert [*await run(two.both, 1)] == ["last"]
        assert (await finish(two.both)).unfinished == ()
        assert (await two.both.control.ledger(KEY)).done == 7


async def test_a_parent_on_the_other_side_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A20, U16: a parent is stored before a child that follows it in a call, also if a carrier runs in between."""
    async with pair() as two:
        await start(two.both)
        await two.both.router.turn("other", OLD)  # as if this queue had not been moved yet
        stored = type(two.old.publisher).publish

        async def publish_and_carry(publisher: Any, *tasks: Task) -> Any:
            answers = await stored(publisher, *tasks)
            await carry_all(two.both)
            return answers

        monkeypatch.setattr(type(two.old.publisher), "publish", publish_and_carry)
        await publish(two.both, "parent", waiting("child", "parent", key="other"))
        assert await two.where("parent") == ["n"]
        assert await state(two.old, "child", "other") == (State.BLOCKED, None)


async def test_a_migration_waits_for_its_lines() -> None:
    """A20, U16: a finish is refused while the old side has lines that were not carried, unless it is forced."""
    async with pair() as two:
        await publish(two.both, "parent")
        await start(two.both)
        await publish(two.both, waiting("child", "parent"))
        await carry_all(two.both)
        async with two.both.subscribe([KEY], "w") as subscription:
            await subscription.ack(*await take(subscription, 1))
        found = await status(two.both)
        assert (found.unfinished, found.uncarried) == ((), True)
        with pytest.raises(MigrationUnfinished, match="reports for tasks"):
            await finish(two.both)
        await carry_all(two.both)
        assert (await state(two.both, "child"))[0] is State.WAITING
        assert not (await finish(two.both)).uncarried


async def test_a_batch_across_a_migration() -> None:
    """A20, U16: a batch of the old side counts members of both sides, also after a rollback."""
    async with pair() as two:
        await publish(two.both, Task(key=KEY, id="batch", batch=BATCH))
        await publish(two.both, *(Task(key=KEY, id=f"o{n}", batch=BATCH) for n in range(3)))
        await start(two.both)
        await publish(two.both, *(Task(key=KEY, id=f"n{n}", batch=BATCH) for n in range(3)))
        await publish(two.both, waiting("then", "batch"))
        await rollback(two.both)
        await publish(two.both, Task(key=KEY, id="late", batch=BATCH))
        assert await dependencies_of(two.both).close(BATCH)
        await run(two.both, 7)
        assert (await state(two.both, "batch"))[0] is State.DONE
        assert [*await run(two.both, 1)] == ["then"]


async def test_a_known_id_and_a_closed_batch() -> None:
    """A16, A20, U12, U16: an id that a newer part knows gets its answer, though older parts refuse late members."""
    sharded = ShardedBackend(MemoryBackend(clock=LoopClock()))
    await shard(sharded, 4)
    replacing = UniqueKey(key="k", on_conflict="replace")
    async with pair() as two:
        for backend in (two.both, sharded):
            await publish(backend, Task(key=KEY, id="batch", batch=BATCH))
            await (start(backend) if backend is two.both else shard(backend, 1))
            await publish(backend, Task(key=KEY, id="first", unique=replacing))
            offer = backend.publisher.publish
            (answer,) = await offer(Task(key=KEY, id="t1", unique=replacing))
            assert answer.existing_id == "first"
            assert await dependencies_of(backend).close(BATCH)
            await carry_all(backend)
            members = [Task(key=KEY, id=i, unique=replacing, batch=BATCH) for i in ("t1", "t2")]
            known, late = await offer(*members)
            assert (known.status, known.existing_id) == (Published.REPLACED, "first")
            assert late.code is Refusal.BATCH_CLOSED


async def test_while_the_old_side_is_down() -> None:
    """A20, U16: in mode ``available``, children of the new side go on while the old side is down; the others wait."""
    async with pair() as two:
        await publish(two.both, "old")
        await start(two.both)
        await publish(two.both, waiting("of-old", "old"))
        parents = [f"p{n}" for n in range(20)]
        await publish(two.both, *parents, *(waiting(f"c{n}", f"p{n}") for n in range(20)))
        await publish(two.both, *(waiting(f"d{n}", "p0") for n in range(20)))
        two.weakness[0].down = True
        # The old side may have the parent, so its child waits until that side answers.
        assert await carry_all(two.both) == 1
        await run(two.both, 20)
        assert len(await run(two.both, 40)) == 40
        assert (await state(two.new, "of-old"))[0] is State.BLOCKED
        assert await carry_all(two.both) == 1
        two.weakness[0].down = False
        await asyncio.sleep(two.both.members[0].down_for)
        assert await carry_all(two.both) == 0
        await run(two.both, 1)
        assert [*await run(two.both, 1)] == ["of-old"]


async def test_shards_on_both_sides() -> None:
    """A16, A20, U16: tasks wait for one another across shards and sides."""
    clock = LoopClock()
    old, new = (ShardedBackend(MemoryBackend(clock=clock)) for _ in range(2))
    both = MigratingBackend(old, new)
    await shard(both, 2)
    await publish(both, *(f"o{n}" for n in range(6)))
    await publish(both, *(waiting(f"oc{n}", f"o{n}", inputs=(0,)) for n in range(6)))
    await start(both)
    await shard(new, 3)
    await publish(both, *(f"n{n}" for n in range(6)))
    await publish(both, *(waiting(f"nc{n}", f"n{n}", f"o{n}", inputs=(0, 1)) for n in range(6)))
    await publish(both, *(waiting(f"x{n}", f"oc{n}", f"nc{n}", inputs=(0, 1)) for n in range(6)))
    await carry_all(both)
    await run(both, 12)
    found = await run(both, 12)
    assert {found[f"oc{n}"].inputs for n in range(6)} == {(f'"o{n}"'.encode(),) for n in range(6)}
    for n in range(6):
        assert found[f"nc{n}"].inputs == (f'"n{n}"'.encode(), f'"o{n}"'.encode())
    last = await run(both, 6)
    for n in range(6):
        assert last[f"x{n}"].inputs == (f'"oc{n}"'.encode(), f'"nc{n}"'.encode())
    assert (await both.control.ledger(KEY)).done == 30
    await both.aclose()
