"""Tests of the example of a GPU server, run in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import httpx2

from taskqueue_dispatch.endpoint_client.answers import Done, JobFailedAnswer
from tests.dispatch.gpu_support import SYNC, calling, endpoint_of, lease_of, task_of
from tests.dispatch.patience import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu_server.py"
LINES = 45


def test_it_is_small() -> None:
    """The example needs at most 45 lines to serve a model (C2)."""
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= LINES


async def test_it_serves() -> None:
    """The example runs jobs of a dispatcher and of direct callers, as its documentation says (C2, C3, C22)."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), str(port), stderr=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}/generate"
    try:
        async with calling() as caller, httpx2.AsyncClient(trust_env=False, verify=False) as client:

            async def well() -> bool:
                return await caller.health(endpoint_of(url), SYNC) is not None

            await until(well)
            job = task_of("job-1", {"prompt": "a sunset"})
            sent = await caller.send(lease_of(url), job, SYNC, attempt=1)
            assert sent == Done(b'{"prompt":"a sunset","image":"https://images.example/job-1.png"}')
            bad = await caller.send(lease_of(url), task_of("job-2", [1]), SYNC, attempt=1)
            assert bad == JobFailedAnswer("HTTP 422: prompt: a text is wanted", final=True)
            direct = await client.post(url, content=b'{"prompt": "a sunset"}')
            assert direct.json()["status"] == "queued"
            job_id = direct.json()["job_id"]

            async def done() -> bool:
                return isinstance(await caller.ask(url, job_id, SYNC), Done)

            await until(done)
    finally:
        process.kill()
        await process.wait()
