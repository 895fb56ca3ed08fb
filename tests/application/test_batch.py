"""Batches of declared tasks, on each kind of store."""

from __future__ import annotations

import pytest

from taskqueue_core import Batch, InvalidInput, Queue, QueueFull, State
from taskqueue_core.capabilities import dead_letters_of
from tests.application.flows import SECONDS, Flows, until
from tests.application.running import OpenWorld, working


@pytest.fixture
def flows() -> Flows:
    """Return a registry without connections."""
    return Flows()


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


def test_bad_input(flows: Flows) -> None:
    """U16: a batch needs a callback, and an id that leaves room for those of its callbacks."""
    with pytest.raises(InvalidInput, match="then: got no callback"):
        Batch()
    for wrong in ("", "x" * 191):
        with pytest.raises(InvalidInput, match="id: got"):
            Batch(then=flows.note.call("x"), id=wrong)
