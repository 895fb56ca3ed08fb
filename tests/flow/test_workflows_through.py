"""Workflows whose steps are in sharded queues, and during a migration (U15, U16)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from taskqueue_core import Queue, Workflow
from taskqueue_core.backend import Backend
from taskqueue_core.migration import MigratingBackend, start
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend
from taskqueue_worker import LocalWorker
from tests.application.flows import Flows
from tests.application.running import working
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
    assert len(flows.ran) == 26
    await backend.aclose()
