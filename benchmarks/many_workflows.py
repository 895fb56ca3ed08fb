"""Count what becomes of many workflows on Redis: ``python benchmarks/many_workflows.py [--workflows N] [--steps N]``.

Each workflow has a first step, a group that gets its result, and a last step that gets all results. Two local workers
run the steps, and publish those of stored workflows. The figures are the workflows that ended, those that are stuck,
the steps that ran, those that ran twice, and the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core import Context, Queue, Tasks, Workflow, WorkflowState
from taskqueue_worker import LocalWorker
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

tasks = Tasks(prefix="many.")
ran: Counter[str] = Counter()


@tasks.task
async def first(context: Context, number: int) -> int:
    """Return a number."""
    ran[context.task_id] += 1
    return number


@tasks.task
async def middle(context: Context, number: int, place: int) -> int:
    """Return a number that depends on the first step."""
    ran[context.task_id] += 1
    return number + place


@tasks.task
async def last(context: Context, numbers: list[int]) -> int:
    """Return the sum."""
    ran[context.task_id] += 1
    return sum(numbers)


def flow_of(number: int, steps: int) -> Workflow:
    """Return a workflow with so many steps."""
    flow = Workflow()
    begin = flow.add(first.call(number))
    group = [flow.add(middle.call(begin.output, place)) for place in range(steps - 2)]
    flow.add(last.call([each.output for each in group]))
    return flow


async def measure(server: RedisServer, workflows: int, steps: int) -> bool:
    """Run all workflows, print the figures, and return whether all of them ended with each step once."""
    async with AsyncExitStack() as stack:
        backends = [
            await stack.enter_async_context(opened(server.url, "many", lease=60.0))
            for _ in range(3)
        ]
        await stack.enter_async_context(tasks.connect(Queue(backends[2])))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        workers = [LocalWorker(tasks, backend=each, concurrency=100) for each in backends[:2]]
        for worker in workers:
            group.create_task(worker.serve())
        start = time.perf_counter()
        flows = (flow_of(number, steps) for number in range(workflows))
        handles = [await flow.publish(id=f"w{number}") for number, flow in enumerate(flows)]
        published = time.perf_counter() - start
        states = Counter([(await handle.wait(600)).state for handle in handles])
        seconds = time.perf_counter() - start
        for worker in workers:
            worker.stop()
    stuck = workflows - states[WorkflowState.ENDED]
    twice = sum(number > 1 for number in ran.values())
    print(
        f"workflows {workflows:,}, ended {states[WorkflowState.ENDED]:,}, stuck {stuck:,}; steps {len(ran):,} of "
        f"{workflows * steps:,}, twice {twice:,}; published in {published:.1f} s, ended in {seconds:.1f} s "
        f"({len(ran) / seconds:,.0f} steps/s)"
    )
    return not stuck and not twice and len(ran) == workflows * steps


def main() -> None:
    """Start a Redis server, measure, and exit with 1 if a workflow is stuck or a step ran twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workflows", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        fine = asyncio.run(measure(server, options.workflows, options.steps))
    sys.exit(not fine)


if __name__ == "__main__":
    main()
