"""Run the workloads of one area with the installed taskqueue packages: python workloads.py AREA TASKS [PID].

Each line on stdin is answered with a line of JSON on stdout: the figures of a slice, which is every workload of the
area with this number of tasks. `compare.py` runs this file with two versions of the source code, so it uses only public
names. The processor time of PID, the process of the store, counts as well.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from meter import cpu_of
from over_socket import running
from processes import pin

from taskqueue_core import Delivery, Queue, Task, connect
from taskqueue_core.capabilities import control_of

PAYLOAD = {"path": "/srv/images/cat.png", "width": 320, "height": 200, "note": "x" * 120}
BATCH = 100
SECONDS = 300.0
"""maximum seconds that a workload waits for tasks before it is invalid"""
PAUSE = float(os.environ.get("BENCHMARK_PAUSE", "0.1"))
"""maximum seconds between two questions whether all tasks are settled"""
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

Figures = dict[str, tuple[float, float]]
"""by row: the time and the processor time for one task, in seconds"""


class Meter:
    """Measures the time of workloads, and the processor time of this process and of others, for each task."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self.figures: Figures = {}

    @contextmanager
    def row(self, name: str, tasks: int) -> Iterator[None]:
        """Measure what the context does with ``tasks`` tasks.

        Python collects garbage at fixed numbers of objects; without a collection before, a row could include one that
        is due because of the rows before it.
        """
        gc.collect()
        others, own, start = sum(map(cpu_of, self._pids)), time.process_time(), time.perf_counter()
        yield
        end, used = time.perf_counter() - start, time.process_time() - own
        used += sum(map(cpu_of, self._pids)) - others
        self.figures[name] = end / tasks, used / tasks


@asynccontextmanager
async def calls(backend: str, *pids: int) -> AsyncIterator[Callable[[int], Awaitable[Figures]]]:
    """Measure each call of a backend, for single tasks and for batches."""
    numbers = itertools.count()
    pin(os.getpid(), 1)

    async def measure(tasks: int) -> Figures:
        meter, slice_ = Meter(*pids), next(numbers)
        async with connect(backend) as queue:
            gc.collect()
            gc.freeze()  # excludes the objects that exist
            for size in (1, BATCH):
                amount = tasks if size > 1 else tasks // 4
                await _each_call(queue, f"{slice_}-{size}", size, amount, meter)
            await _retry(queue, f"{slice_}-retry", tasks, meter)
            await _alone(queue, f"{slice_}-alone", tasks // 4, meter)
        gc.unfreeze()
        return meter.figures

    yield measure


async def _each_call(queue: Queue, key: str, size: int, count: int, meter: Meter) -> None:
    """Publish all tasks, receive all of them, and ack all of them."""
    work = [Task.of(key, PAYLOAD) for _ in range(count)]
    with meter.row(f"publish, {size} a call", count):
        for first in range(0, count, size):
            await queue.backend.publisher.publish(*work[first : first + size])
    async with queue.backend.subscribe([key], "bench") as subscription:
        received: list[tuple[Delivery, ...]] = []
        number = 0
        with meter.row(f"receive, {size} a call", count):
            while number < count:
                received.append((await subscription.receive(size, SECONDS)).deliveries)
                number += len(received[-1])
                if not received[-1]:
                    raise SystemExit(f"invalid: {number} of {count} tasks of {key} received")
        with meter.row(f"ack, {size} a call", count):
            for deliveries in received:
                await subscription.ack(*deliveries)


async def _retry(queue: Queue, key: str, count: int, meter: Meter) -> None:
    """Publish and receive every task, and then schedule the retries, a batch at once."""
    await queue.publish_many([Task.of(key, PAYLOAD) for _ in range(count)])
    publisher, at = queue.backend.publisher, queue.backend.now() + 3600
    received: list[Delivery] = []
    async with queue.backend.subscribe([key], "bench") as subscription:
        while len(received) < count:
            received += (await subscription.receive(BATCH, SECONDS)).deliveries
        with meter.row(f"schedule_retry, {BATCH} at once", count):
            for first in range(0, count, BATCH):
                batch = received[first : first + BATCH]
                calls = (publisher.schedule_retry(each.task, at, settles=each) for each in batch)
                await asyncio.gather(*calls)


async def _alone(queue: Queue, key: str, count: int, meter: Meter) -> None:
    """Publish, receive and ack one task after another."""
    async with queue.backend.subscribe([key], "bench") as subscription:
        with meter.row("publish, receive and ack of one task", count):
            for _ in range(count):
                await queue.publish(key, PAYLOAD)
                received = await subscription.receive(1, 0)
                await subscription.ack(*received.deliveries)


@asynccontextmanager
async def server(backend: str, *pids: int) -> AsyncIterator[Callable[[int], Awaitable[Figures]]]:
    """Measure a server with one worker process on a socket: from the first task to the last one that is settled."""
    async with running(WORKER, backend) as (queue, own):
        control, rounds = control_of(queue.backend), itertools.count(1)
        for core, pid in enumerate((*own, os.getpid())):
            pin(pid, min(core, 1))  # the server on one core, the others on another

        async def measure(tasks: int) -> Figures:
            meter, total = Meter(*own, *pids), tasks * next(rounds)
            for key, state in (("ack", "done"), ("retry", "scheduled")):
                settings = await control.settings(key)
                await control.configure(key, settings.model_copy(update={"paused": True}))
                work = [Task.of(key, PAYLOAD) for _ in range(tasks)]
                with meter.row(f"publish to {key} over HTTP, in bulk", tasks):
                    await queue.publish_many(work)
                settings = await control.settings(key)
                with meter.row(f"{key} through the server", tasks):
                    await control.configure(key, settings.model_copy(update={"paused": False}))
                    await _until(queue, key, state, total, tasks)
            acks, retries = (meter.figures[f"{key} through the server"] for key in ("ack", "retry"))
            relative = retries[0] / acks[0], retries[1] / acks[1]
            meter.figures["retry / ack through the server"] = relative
            return meter.figures

        yield measure


async def _until(queue: Queue, key: str, state: str, total: int, tasks: int) -> None:
    """Wait until ``total`` tasks are in a state. The pauses get shorter, so that few questions disturb the server."""
    start = time.monotonic()
    while left := total - (number := getattr(await queue.ledger(key), state)):
        passed = time.monotonic() - start
        if passed > SECONDS:
            raise SystemExit(f"invalid: {number} of {total} tasks of {key} are {state}")
        rate = (tasks - left) / passed
        await asyncio.sleep(min(PAUSE, max(PAUSE / 50, left / rate / 2 if rate else 0.0)))


AREAS = {
    "memory": (calls, "memory"),
    "redis": (calls, "redis"),
    "server, memory": (server, "memory"),
    "server, redis": (server, "redis"),
}
"""by area: what measures it, and the backend"""


async def main(area: str, tasks: int, *pids: int) -> None:
    """Measure a slice for each line on stdin, and print its figures."""
    logging.disable(logging.WARNING)  # that the store is not persistent
    opened, backend = AREAS[area]
    async with opened(backend, *pids) as measure:
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await measure(tasks)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
