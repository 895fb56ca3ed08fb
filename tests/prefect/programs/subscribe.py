"""Receive and ack runs through Prefect's own client, and print the rate of deliveries.

Usage: ``subscribe.py WORKERS RUNS KEY``. The time begins when each worker has received a run.
"""

import asyncio
import sys
import time

from prefect.client.schemas.objects import TaskRun
from prefect.client.subscriptions import Subscription
from prefect.settings import PREFECT_API_URL


async def main(workers: int, runs: int, key: str) -> None:
    """Receive all runs, and print the rate."""
    left, idle, span = runs, workers, (0, 0.0)
    done = asyncio.Event()

    async def work(number: int) -> None:
        nonlocal left, idle, span
        subscription = Subscription(
            TaskRun,
            "/task_runs/subscriptions/scheduled",
            [key],
            f"worker-{number}",
            PREFECT_API_URL.value(),
        )
        first = True
        async for _ in subscription:
            left -= 1
            if first:
                first, idle = False, idle - 1
                if not idle:
                    span = left, time.monotonic()
            if not left:
                done.set()

    tasks = [asyncio.create_task(work(number)) for number in range(workers)]
    await asyncio.wait_for(done.wait(), 60)
    count, begin = span
    assert count, "a worker received no run, or all runs before another worker had one"
    sys.stdout.write(str(count / (time.monotonic() - begin)))
    for task in tasks:
        task.cancel()


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
