"""Test of the dispatcher on a Redis Cluster, where its queues are spread over the nodes."""

from __future__ import annotations

from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.status import JobState
from tests.dispatch.support import dispatching, ended, send, serve
from tests.redis.backends import opened
from tests.redis.clusters import Cluster

MODELS = tuple(f"model-{number}" for number in range(12))


async def test_every_node_is_asked(redis_cluster: Cluster, redis_prefix: str) -> None:
    """Jobs, dead letters and counts are found on all partitions of the cluster (C24, FIX-C6, OPEN-C5)."""
    async with (
        opened(redis_cluster.url, redis_prefix, lease=10.0) as backend,
        SimulatedGpu(name="a", slots=4, latency=0.001, mode=Mode.FAIL) as gpu,
        dispatching(backend, breaker_failures=1000) as dispatcher,
    ):
        partitions = {backend._context.scripts.partitions.of(queue_of(model)) for model in MODELS}
        assert len(partitions) >= 3
        ids = []
        for model in MODELS:
            await serve(dispatcher, model, gpu, config=ModelConfig(max_retries=0))
            ids += await send(dispatcher, model, 2)
        await ended(dispatcher, ids, JobState.FAILED)
        dead = await dispatcher.jobs.list(limit=100)
        assert {letter.task.id for letter in dead} == set(ids)
        gpu.mode = Mode.OK
        assert await dispatcher.jobs.redrive_all() == len(ids)
        await ended(dispatcher, ids)
        assert {view.model for view in await dispatcher.registry.models()} == set(MODELS)
