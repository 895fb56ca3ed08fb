"""Workflows whose steps are in sharded queues, and during a migration (U15, U16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from taskqueue_core import Queue, Workflow, WorkflowState
from taskqueue_core.backend import Backend
from taskqueue_core.consumer.expander import Expander
from taskqueue_core.migration import MigratingBackend, start
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.flows import Flows
from tests.application.running import working
from tests.application.test_workflow_additions import Splits
from tests.flow.test_shards import shard

NAMES = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]


async def _sharded() -> ShardedBackend:
    backend = ShardedBackend(MemoryBackend())
    for key in ("flow.size", "flow.total", "flow.double"):
        await shard(backend, 3, key)
    return backend


async def _migrating() -> MigratingBackend:
    backend = MigratingBackend(MemoryBackend(), MemoryBackend())
    await start(backend)
    return backend


@pytest.mark.parametrize("opened", [_sharded, _migrating], ids=["shards", "migration"])
async def test_results_as_inputs(opened: Callable[[], Any]) -> None:
    """A16, A20, U15: each step runs once, with the results of steps in other shards or on another side."""
    flows, backend = Flows(), await opened()
    connection: Backend = backend
    async with (
        flows.tasks.connect(Queue(connection)),
        working(LocalWorker(flows.tasks, backend=connection)),
    ):
        for _ in range(2):
            flow = Workflow()
            sizes = [flow.add(flows.size.call(name)) for name in NAMES]
            doubles = [flow.add(flows.double.call(size.output), after=size) for size in sizes]
            total = flow.add(flows.total.call([each.output for each in doubles]), after=doubles)
            handle = await flow.publish()
            assert await handle.result(total, timeout=60) == {"sum": 42}
        page = await Queue(connection).workflows.list()
        assert [(each.state, each.steps) for each in page.workflows] == [
            (WorkflowState.ENDED, 13)
        ] * 2
    assert len(flows.ran) == 26
    await backend.aclose()


async def test_steps_in_two_members() -> None:
    """A20, U15, U16: steps in the old backend of a migration add steps, and are waited for, in the new one."""
    old, new = MemoryBackend(), MemoryBackend()
    flows, backend = Splits(), MigratingBackend(old, new)
    async with flows.tasks.connect(Queue(backend)):
        before = Workflow()
        size = before.add(flows.size.call("abc"))
        split = before.add(flows.split.call(["a", "bb"]), after=size)
        before.add(flows.double.call(size.output), after=split)
        first = await before.publish(id="old")
        await Expander(backend).drain()
        await start(backend)
        after = Workflow()
        after.add(flows.note.call("after"), after=first.step(split))
        second = await after.publish(id="new")
        async with working(LocalWorker(flows.tasks, backend=backend)):
            for handle in (first, second):
                assert (await handle.wait(60)).state is WorkflowState.ENDED
        page = await Queue(backend).workflows.list()
        assert [each.id for each in page.workflows] == ["new", "old"]
    assert sorted(flows.ran) == sorted(
        ["size abc", "size a", "size bb", "total [1, 2]", "double 3", "end", "ended", "after"]
    )
    assert (await old.control.ledger("flow.size")).done == 1
    assert (await new.control.ledger("flow.size")).done == 2
    await backend.aclose()
