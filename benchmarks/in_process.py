"""The memory backend in one process, compared with a bare ``asyncio.Queue`` without any guarantee."""

from __future__ import annotations

import asyncio
import time

from taskqueue_core import Task
from taskqueue_core.assembly import open_backend
from taskqueue_core.config import Settings
from taskqueue_memory import MemoryBackend

TASKS = 20_000
BATCH = 100
KEY = "bench"
PAYLOAD = {"path": "/srv/images/cat.png", "width": 320, "height": 200, "note": "x" * 120}


def tasks() -> list[Task]:
    """Create the tasks of one measurement, with payloads of about 200 bytes."""
    return [Task.of(KEY, PAYLOAD) for _ in range(TASKS)]


async def floor() -> dict[str, float]:
    """Measure ``asyncio.Queue``: put and get one item after another."""
    queue: asyncio.Queue[Task] = asyncio.Queue()
    work = tasks()
    start = time.perf_counter()
    for task in work:
        await queue.put(task)
    for _ in work:
        await queue.get()
    return {"asyncio.Queue, put and get, tasks/s": TASKS / (time.perf_counter() - start)}


async def bulk() -> dict[str, float]:
    """Publish, receive and ack in batches."""
    backend = MemoryBackend()
    work = tasks()
    start = time.perf_counter()
    for first in range(0, TASKS, BATCH):
        await backend.publisher.publish(*work[first : first + BATCH])
    published = time.perf_counter()
    await _drain(backend, BATCH)
    end = time.perf_counter()
    return {
        f"publish in batches of {BATCH}, tasks/s": TASKS / (published - start),
        f"receive and ack in batches of {BATCH}, tasks/s": TASKS / (end - published),
    }


async def single() -> dict[str, float]:
    """Publish, receive and ack one by one."""
    backend = MemoryBackend()
    work = tasks()
    start = time.perf_counter()
    for task in work:
        await backend.publisher.publish(task)
    published = time.perf_counter()
    await _drain(backend, 1)
    end = time.perf_counter()
    return {
        "publish one by one, tasks/s": TASKS / (published - start),
        "receive and ack one by one, tasks/s": TASKS / (end - published),
    }


async def lone() -> dict[str, float]:
    """Publish, receive and ack each task before the next is published, on the backend as applications open it."""
    backend = open_backend("memory", Settings.model_construct())
    work = tasks()
    publisher = backend.publisher
    async with backend.subscribe([KEY], "bench") as subscription:
        start = time.perf_counter()
        for task in work:
            await publisher.publish(task)
            received = await subscription.receive(1, 0)
            await subscription.ack(*received.deliveries)
        seconds = time.perf_counter() - start
    await backend.aclose()
    return {"a lone task: publish, receive and ack, µs": 1e6 * seconds / TASKS}


async def many_keys() -> dict[str, float]:
    """Measure receive and ack with a subscription to 1,000 keys, of which 10 have tasks."""
    backend = MemoryBackend()
    keys = [f"k{number}" for number in range(1000)]
    work = [Task.of(keys[number % 10], PAYLOAD) for number in range(TASKS)]
    await backend.publisher.publish(*work)
    start = time.perf_counter()
    await _drain(backend, BATCH, keys)
    return {"1,000 keys, 10 with work, tasks/s": TASKS / (time.perf_counter() - start)}


async def _drain(backend: MemoryBackend, limit: int, keys: list[str] | None = None) -> None:
    handled: set[str] = set()
    async with backend.subscribe(keys or [KEY], "bench") as subscription:
        while len(handled) < TASKS:
            received = await subscription.receive(limit, 0)
            if not received.deliveries:
                raise SystemExit(f"invalid: {len(handled)} of {TASKS} handled")
            await subscription.ack(*received.deliveries)
            handled.update(delivery.task.id for delivery in received.deliveries)
    await backend.aclose()


MEASUREMENTS = (floor, bulk, single, lone, many_keys)
