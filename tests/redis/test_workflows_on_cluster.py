"""Workflows whose steps are in different partitions of a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter

from taskqueue_core.after import TaskRef
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_core.queue import Queue
from taskqueue_core.workflows import WorkflowState, WorkflowStep
from tests.redis.backends import PATIENCE, opened
from tests.redis.clusters import Cluster

NUMBER, QUEUES, ADDING = 20, 8, 5


def _steps() -> list[WorkflowStep]:
    """Return a diamond whose steps are in different queues, and pass on their results."""
    middle = [
        WorkflowStep.of(f"m{n}", f"q{n}", {"$input": 0}, after=("first",), inputs=(0,))
        for n in range(QUEUES)
    ]
    names = tuple(step.name for step in middle)
    return [
        WorkflowStep.of("first", "q0"),
        *middle,
        WorkflowStep.of("last", "q1", {"$input": 3}, after=names, inputs=tuple(range(QUEUES))),
        WorkflowStep.of("failed", "q2", after=names, when="failed"),
        WorkflowStep.of("ended", "q3", after=("last", "failed"), when="ended"),
    ]


ADDED = [
    WorkflowStep.of("x", "q4"),
    WorkflowStep.of("y", "q5", {"$input": 0}, after=("x",), inputs=(0,)),
]
"""what the first step of some workflows adds"""


async def test_steps_in_many_partitions(redis_cluster: Cluster, redis_prefix: str) -> None:
    """U16: across partitions, each step runs once with its inputs, also if its queue forgets ended tasks at once.

    So do the steps that a step adds whose record is deleted at its end.
    """
    ran: Counter[str] = Counter()
    async with opened(redis_cluster.url, redis_prefix, partitions=8) as backend:
        for n in range(0, QUEUES, 2):
            await backend.control.configure(f"q{n}", QueueSettings(dedupe_window=0, result_ttl=0))
        queue = Queue(backend)
        keeping = asyncio.create_task(run_maintenance(backend))
        try:
            for n in range(NUMBER):
                await queue.workflows.put(_steps(), id=f"w{n}")
            keys = [f"q{n}" for n in range(QUEUES)]
            async with asyncio.timeout(2 * PATIENCE), backend.subscribe(keys, "w") as consumer:
                while len(ran) < NUMBER * (QUEUES + 3) + ADDING * len(ADDED):
                    received = await consumer.receive(100, 1)
                    for delivery in received.deliveries:
                        ran[delivery.task.id] += 1
                        name = delivery.task.id.partition(".")[2]
                        if name == "first" and int(delivery.task.id[1:].partition(".")[0]) < ADDING:
                            by = TaskRef(delivery.task.key, delivery.task.id)
                            await queue.workflows.add(ADDED, by=by)
                        wanted = {"m": 1, "l": QUEUES, "y": 1}.get(name.rpartition(":")[2][0], 0)
                        assert len(delivery.inputs) == wanted
                        assert None not in delivery.inputs
                    if received.deliveries:
                        results = [b'"x"'] * len(received.deliveries)
                        await consumer.ack(*received.deliveries, results=results)
            for n in range(NUMBER):
                status = await queue.workflows.wait(f"w{n}")
                assert status is not None
                assert status.state is WorkflowState.ENDED
                assert len(status.steps) == QUEUES + 4 + len(ADDED) * (n < ADDING)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
    assert set(ran.values()) == {1}
    assert not [task_id for task_id in ran if task_id.endswith(".failed")]
