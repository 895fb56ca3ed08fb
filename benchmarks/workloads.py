"""Run the workloads of one area with the installed taskqueue packages, and print the figures as JSON.

`compare.py` runs this file in turn with two versions of the source code, so it uses only public names.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time

from over_socket import running

from taskqueue_core import Delivery, Queue, Task, connect
from taskqueue_core.capabilities import QueueSettings, control_of

PAYLOAD = {"path": "/srv/images/cat.png", "width": 320, "height": 200, "note": "x" * 120}
SECONDS = 300.0
"""maximum seconds that a workload waits for tasks before it is invalid"""
WORKER = """
from taskqueue_worker import Retry, Worker

worker = Worker(concurrency=100)


@worker.task("ack")
async def ack(**payload: object) -> None:
    pass


@worker.task("retry")
async def retry(**payload: object) -> None:
    raise Retry(delay=3600)
"""


async def calls(backend: str, tasks: int, batch: int = 100) -> dict[str, float]:
    """Measure each call of a backend, for single tasks and for batches; return tasks per second."""
    rates = {}
    async with connect(backend) as queue:
        for prefix, count in (("warm-up-", tasks // 20), ("", tasks)):
            if not prefix:  # exclude existing objects from garbage collection
                gc.collect()
                gc.freeze()
            for size in (1, batch):
                key = f"{prefix}{size}"
                amount = count if size > 1 else count // 4
                work = [Task.of(key, PAYLOAD) for _ in range(amount)]
                start = time.perf_counter()
                for first in range(0, amount, size):
                    await queue.backend.publisher.publish(*work[first : first + size])
                rates[f"publish, {size} a call"] = amount / (time.perf_counter() - start)
                receive, settle = await _drain(queue, key, size, amount)
                rates[f"receive, {size} a call"] = receive
                rates[f"ack, {size} a call"] = settle
            retried = await _retry(queue, f"{prefix}retry", batch, count)
            rates[f"schedule_retry, {batch} at once"] = retried
            alone = await _alone(queue, f"{prefix}alone", count // 4)
            rates["publish, receive and ack of one task"] = alone
    return rates


async def _alone(queue: Queue, key: str, count: int) -> float:
    """Publish, receive and ack one task after another; return the rate."""
    async with queue.backend.subscribe([key], "bench") as subscription:
        start = time.perf_counter()
        for _ in range(count):
            await queue.publish(key, PAYLOAD)
            received = await subscription.receive(1, 0)
            await subscription.ack(*received.deliveries)
        return count / (time.perf_counter() - start)


async def _drain(queue: Queue, key: str, size: int, count: int) -> tuple[float, float]:
    """Receive and ack every task; return the two rates."""
    received = settled = 0.0
    handled = 0
    async with queue.backend.subscribe([key], "bench") as subscription:
        while handled < count:
            start = time.perf_counter()
            deliveries = (await subscription.receive(size, SECONDS)).deliveries
            middle = time.perf_counter()
            await subscription.ack(*deliveries)
            received += middle - start
            settled += time.perf_counter() - middle
            if not deliveries:
                raise SystemExit(f"invalid: {handled} of {count} tasks of {key} received")
            handled += len(deliveries)
    return count / received, count / settled


async def _retry(queue: Queue, key: str, batch: int, count: int) -> float:
    """Publish and receive every task, and schedule its retry, a batch at once; return the rate of the retries."""
    await queue.publish_many([Task.of(key, PAYLOAD) for _ in range(count)])
    seconds, handled = 0.0, 0
    publisher = queue.backend.publisher
    at = queue.backend.now() + 3600

    def retry(delivery: Delivery) -> asyncio.Future[object]:
        return asyncio.ensure_future(publisher.schedule_retry(delivery.task, at, settles=delivery))

    async with queue.backend.subscribe([key], "bench") as subscription:
        while handled < count:
            deliveries = (await subscription.receive(batch, SECONDS)).deliveries
            start = time.perf_counter()
            await asyncio.gather(*map(retry, deliveries))
            seconds += time.perf_counter() - start
            if not deliveries:
                raise SystemExit(f"invalid: {handled} of {count} retries scheduled")
            handled += len(deliveries)
    return count / seconds


async def server(backend: str, tasks: int) -> dict[str, float]:
    """Measure a server with one worker process on a socket: from the first task to the last one that is settled."""
    rates = {}
    async with running(WORKER, backend) as queue:
        for key, states in (("ack", ("done",)), ("retry", ("scheduled",))):
            control = control_of(queue.backend)
            settings = await control.configure(key, QueueSettings(paused=True))
            start = time.perf_counter()
            await queue.publish_many([Task.of(key, PAYLOAD) for _ in range(tasks)])
            rates[f"publish to {key} over HTTP, in bulk"] = tasks / (time.perf_counter() - start)
            start = time.perf_counter()
            await control.configure(key, settings.model_copy(update={"paused": False}))
            await _until(queue, key, states[0], tasks)
            rates[f"{key} through the server"] = tasks / (time.perf_counter() - start)
    rates["retry / ack through the server"] = (
        rates["retry through the server"] / rates["ack through the server"]
    )
    return rates


async def _until(queue: Queue, key: str, state: str, count: int) -> None:
    deadline = time.monotonic() + SECONDS
    while (number := getattr(await queue.ledger(key), state)) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"invalid: {number} of {count} tasks of {key} are {state}")
        await asyncio.sleep(0.005)


AREAS = {
    "memory": (calls, "memory", 40_000),
    "redis": (calls, "redis", 20_000),
    "server, memory": (server, "memory", 12_000),
    "server, redis": (server, "redis", 12_000),
}
"""by area: what measures it, the backend, and the number of tasks"""

if __name__ == "__main__":
    measure, store, number = AREAS[sys.argv[1]]
    number = int(sys.argv[2]) if sys.argv[2:] else number
    print(json.dumps(asyncio.run(measure(store, number))))
