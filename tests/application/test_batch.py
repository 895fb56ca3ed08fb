"""Batches of declared tasks, on each kind of store."""

from __future__ import annotations

from typing import Any, cast

import pytest

from taskqueue_core import (
    Batch,
    Call,
    Context,
    Handle,
    Instant,
    InvalidInput,
    Queue,
    QueueFull,
    Reject,
    ResultGone,
    State,
    Tasks,
)
from taskqueue_core.capabilities import dead_letters_of
from taskqueue_core.limits import LIMITS
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.flows import SECONDS, Flows, until
from tests.application.running import OpenWorld, also_on_a_cluster, working


@pytest.fixture
def flows() -> Flows:
    """Return a registry without connections."""
    return Flows()


@also_on_a_cluster
async def test_all_are_done(flows: Flows, world: OpenWorld) -> None:
    """U16: `then` and `ended` run once when the batch is closed and all members are done; `failed` does not."""
    async with (
        world() as opened,
        flows.tasks.connect(Queue(opened.backend)),
        working(opened.worker(flows.tasks)),
    ):
        batch = Batch(
            then=flows.note.call("then"),
            failed=flows.note.call("failed"),
            ended=flows.note.call("ended"),
        )
        for start in range(0, 60, 20):
            some = [flows.size.call("x" * n) for n in range(start, start + 20)]
            handles = await batch.add(*some)
            assert await handles[-1].result(SECONDS) == start + 19
        await batch.close()
        await batch.close()
        assert await batch.wait(SECONDS) is State.DONE
        await until(lambda: _has(flows, "ended"))
        await until(lambda: _has(flows, "then"))
        assert sorted(flows.ran[-2:]) == ["ended", "then"]
        assert len(flows.ran) == 62
        with pytest.raises(QueueFull, match="is closed"):
            await batch.add(flows.size.call("late"))


async def test_a_member_that_is_discarded(flows: Flows, world: OpenWorld) -> None:
    """U16: a dead member holds the batch; its discard lets `failed` run, and cancels `then`."""
    async with (
        world() as opened,
        flows.tasks.connect(Queue(opened.backend)),
        working(opened.worker(flows.tasks)),
    ):
        batch = Batch(then=flows.note.call("then"), failed=flows.note.call("failed"), id="b")
        (handle, _) = await batch.add(flows.breaks.call(), flows.size.call("x"))
        await batch.close()
        dead = dead_letters_of(opened.backend)

        async def is_dead() -> bool:
            return await dead.get(handle.key, handle.id) is not None

        await until(is_dead)
        assert flows.ran == ["size x"]
        await dead.discard(handle.key, handle.id)
        assert await batch.wait(SECONDS) is State.CANCELLED
        await until(lambda: _has(flows, "failed"))
        assert flows.ran == ["size x", "failed"]


async def _has(flows: Flows, text: str) -> bool:
    return text in flows.ran


def _measuring(**options: Any) -> Tasks:
    """Return a registry whose task ``size`` is found by its batch, and one that adds the results of members up."""
    tasks = Tasks()

    @tasks.task(index=("batch",), keep_ended=600, tags=("own",), **options)
    async def size(text: str) -> int:
        if not text:
            raise Reject("empty")
        return len(text)

    @tasks.task
    async def total(context: Context) -> int:
        return sum([number async for _, number in context.results(size)])

    return tasks


async def test_results_of_members() -> None:
    """U16, U18: a callback reads the results of the members that are done, by pages, and not those of another batch."""
    tasks, backend = _measuring(), MemoryBackend()
    size, total = tasks.functions["size"], tasks.functions["total"]

    async def are_dead() -> bool:
        return (await backend.control.ledger("size")).dead == 51

    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        await tasks.apply()
        batches = [Batch(ended=total.call(), id=name) for name in "ab"]
        for batch, number in zip(batches, (250, 3), strict=True):
            handles = await batch.add(*(size.call("x" * (n % 5)) for n in range(number)))
            await batch.close()
            details = await handles[1].details()
            assert details is not None
            assert details.task.tags == ("own", f"batch:{batch.ref.task_id}")
        await until(are_dead)
        await backend.dead_letters.discard("size")
        assert await total.handle("a.ended").result(SECONDS) == 50 * (1 + 2 + 3 + 4)
        assert await total.handle("b.ended").result(SECONDS) == 3
        assert [number async for _, number in batches[1].results(size)] == [1, 2]


async def test_results_that_cannot_be_read() -> None:
    """U16: results that are kept no longer, tasks that are not found by their batch, and a task that is no callback."""
    tasks, backend = _measuring(result_ttl=0), MemoryBackend()
    size, total = tasks.functions["size"], tasks.functions["total"]
    batch = Batch(then=total.call())
    async with tasks.connect(Queue(backend)), working(LocalWorker(tasks, backend=backend)):
        await tasks.apply()
        await batch.add(size.call("x"))
        await batch.close()
        assert await batch.wait(SECONDS) is State.DONE
        with pytest.raises(ResultGone):
            await anext(batch.results(size))
        with pytest.raises(InvalidInput, match=r"of: got the task 'total', .*index=\('batch',\)"):
            await anext(batch.results(total))
        alone = await total.using(id=f"{batch.ref.task_id}.ended").publish()
        await until(lambda: _error_of(alone))
        assert "context.results: got a task that is no callback" in str(await _error_of(alone))
        with pytest.raises(InvalidInput, match="id: got 95 characters"):
            await Batch(then=total.call(), id="x" * 95).add(size.call("x"))


async def _error_of(handle: Handle[Any]) -> str | None:
    status = await handle.status()
    return None if status is None else status.error


@pytest.mark.parametrize("wrong", ["call", "value", "option", "size", "arguments", "tags"])
async def test_a_wrong_call_leaves_nothing_stored(wrong: str) -> None:
    """U16: all calls are checked before one of them is stored, also those that a later request would store."""
    tasks, backend = _measuring(), MemoryBackend()
    size, total = tasks.functions["size"], tasks.functions["total"]
    # With that of the declaration and that of the batch, they are nine.
    tags = tuple(map(str, range(7)))
    calls = {
        "call": "size",
        "value": size.using(priority=10).call("x"),
        "option": size.using(delay=1, not_before=1).call("x"),
        "size": size.using(headers={"x": "x" * 8192}).call("x"),
        "arguments": size.call(Instant),
        "tags": size.using(tags=tags).call("x"),
    }
    good = [size.call("x") for _ in range(LIMITS.batch)]
    async with tasks.connect(Queue(backend)):
        batch = Batch(ended=total.call())
        with pytest.raises(InvalidInput):
            await batch.add(*good, cast("Call[Any]", calls[wrong]))
        assert not await backend.control.queues()
        handles = await batch.add(good[0], good[0])
        assert len({handle.id for handle in handles}) == 2


def test_bad_input(flows: Flows) -> None:
    """U16: a batch needs a callback, and an id that leaves room for those of its callbacks."""
    with pytest.raises(InvalidInput, match="then: got no callback"):
        Batch()
    for wrong in ("", "x" * 191):
        with pytest.raises(InvalidInput, match="id: got"):
            Batch(then=flows.note.call("x"), id=wrong)
