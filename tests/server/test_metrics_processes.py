"""Metrics of several server processes: each process reports the sum over all processes."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2

from taskqueue_server.metrics.exporter import FOLDER
from tests.server.support import Worker, eventually, receipts
from tests.server.test_metrics import Seen, scrape

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(folder: Path) -> AsyncIterator[tuple[str, Process]]:
    """Run a server process that shares its metrics with other processes in a folder."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.server.metrics_program"),
        cwd=ROOT,
        env={**os.environ, FOLDER: str(folder)},
        stdout=PIPE,
    )
    try:
        assert server.stdout is not None
        yield (await server.stdout.readline()).decode().strip(), server
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def test_they_add_up(tmp_path: Path) -> None:
    """E5: counters, latencies and sockets are summed over all processes.

    The counts of an ended process remain in the sum, but its sockets do not.
    """
    async with (
        process(tmp_path) as (one, _),
        process(tmp_path) as (two, killed),
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        client.base_url = httpx2.URL(one)
        for n, url in enumerate((one, one, two)):
            await client.post(f"{url}/v1/tasks", json={"key": "k", "id": f"t{n}"})
        hello = {"keys": ["k"], "credit": 10}
        async with (
            Worker(one.replace("http", "ws") + "/v1/socket", {"worker_id": "a", **hello}) as a,
            Worker(two.replace("http", "ws") + "/v1/socket", {"worker_id": "b", **hello}) as b,
        ):
            for worker, number in ((a, 2), (b, 1)):
                await worker.send("ack", receipts=receipts(await worker.deliveries(number)))
                await worker.settled(number)

            async def told() -> Seen | None:
                seen = await scrape(client)
                done = seen.samples.get(("taskqueue_settled_total", ("outcome", "done")))
                ended = seen.samples.get(
                    ("taskqueue_task_end_to_end_seconds_bucket", ("key", "k"), ("le", "+Inf"))
                )
                return seen if done == ended == 3 else None

            seen: Seen = await eventually(told)
            post = {"method": "POST", "path": "/v1/tasks"}
            assert seen("http_requests_total", **post, status="2xx") == 3
            assert seen("http_request_seconds_count", **post) == 3
            assert seen("task_wait_seconds_count", key="k") == 3
            assert seen("task_end_to_end_seconds_bucket", key="k", le="+Inf") == 3
            assert seen("connections", state="welcome") == 2
            assert seen("credit_tasks") == 17
            assert "pid" not in seen.text
            killed.kill()
            await killed.wait()
            seen = await scrape(client)
            assert seen("settled_total", outcome="done") == 3
            assert seen("connections", state="welcome") == 1
            assert seen("published_total", key="k") == 2, "each process has its own store"
