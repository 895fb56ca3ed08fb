"""A server and a worker process connected by a WebSocket: throughput with a backlog, latency at a steady rate."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles

import over_window

from taskqueue_core import Queue, Task
from taskqueue_remote import RemoteBackend

TASKS = 10_000
RATE = 200
SECONDS = 10
KEY = "bench"
PATIENCE = 60.0
QUIET = ("--log-level", "error")
WORKER = """
import time
from taskqueue_worker import Worker

worker = Worker(concurrency=100)


@worker.task("bench")
async def handle(sent: float) -> float:
    return time.time() - sent
"""


@asynccontextmanager
async def running(
    worker: str = WORKER, backend: str = "memory"
) -> AsyncIterator[tuple[Queue, list[int]]]:
    """Start a server on a backend, and a process with the given worker source.

    Yields a queue for publishing, and the ids of the two processes.
    """
    children: list[subprocess.Popen[str]] = []

    def start(*words: str, folder: str) -> dict[str, str]:
        command = [sys.executable, "-m", "taskqueue_cli", *words, "--json"]
        child = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        children.append(child)
        assert child.stdout is not None
        ready: dict[str, str] = json.loads(child.stdout.readline())
        return ready

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench_worker.py").write_text(worker)
        try:
            served = start("serve", "--backend", backend, "--port", "0", *QUIET, folder=folder)
            url = served["url"]
            start("worker", "bench_worker:worker", "--url", url, *QUIET, folder=folder)
            remote = RemoteBackend(url)
            yield Queue(remote), [child.pid for child in children]
            await remote.aclose()
        finally:
            for child in reversed(children):
                child.terminate()
                child.communicate()


async def throughput() -> dict[str, float]:
    """Publish tasks over HTTP in bulk while one worker executes them, with one ack for each task."""
    async with running() as (queue, _):
        start = time.perf_counter()
        await queue.publish_many([Task.of(KEY, {"sent": 0}) for _ in range(TASKS)])
        published = time.perf_counter()
        await _until_done(queue, TASKS)
        end = time.perf_counter()
    return {
        "publish in bulk over HTTP, tasks/s": TASKS / (published - start),
        "publish to acked, one worker, tasks/s": TASKS / (end - start),
    }


async def latency() -> dict[str, float]:
    """Publish single tasks at a steady rate; the handler measures the time since its task was published."""
    async with running() as (queue, _):
        ids = []
        start = time.perf_counter()
        for number in range(RATE * SECONDS):
            await asyncio.sleep(max(0.0, start + number / RATE - time.perf_counter()))
            ids.append((await queue.publish(KEY, {"sent": time.time()})).task_id)
        await _until_done(queue, len(ids))
        ages = [1000 * (await queue.result(KEY, task_id)) for task_id in ids]
    return {
        f"publish to handler at {RATE}/s, p50 ms": median(ages),
        f"publish to handler at {RATE}/s, p99 ms": quantiles(ages, n=100)[98],
    }


async def _until_done(queue: Queue, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while (ledger := await queue.ledger(KEY)).done < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"invalid: {ledger.done} of {count} handled")
        await asyncio.sleep(0.02)
    if ledger.published != count or not ledger.balanced:
        raise SystemExit("invalid: the ledger does not balance")


MEASUREMENTS = (over_window.throughput, throughput, latency)
