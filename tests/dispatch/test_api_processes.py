"""Tests of ``taskqueue serve --with dispatch``, with one server process and with several."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from tests.dispatch.patience import eventually
from tests.redis.servers import RedisServer
from tests.redis.serving import serving

_DISPATCH: dict[str, Any] = {
    "dispatch_health_interval": "0.2",
    "dispatch_lease": "3",
    "dispatch_safety_pass": "0.3",
}


async def all_done(client: httpx2.AsyncClient, ids: list[str]) -> None:
    """Wait until every job is done."""
    for job_id in ids:

        async def done(job_id: str = job_id) -> bool:
            answer = await client.get(f"/queue/jobs/{job_id}?wait=5")
            return bool(answer.json()["state"] == "done")

        await eventually(done)


async def submit(client: httpx2.AsyncClient, number: int) -> list[str]:
    """Submit jobs, each of which must be accepted, and return their ids."""
    ids = []
    for n in range(number):
        answer = await client.post("/queue/submit", json={"model": "zimg", "payload": n})
        assert answer.status_code == 202, answer.text
        ids.append(answer.json()["job_id"])
    return ids


async def register(client: httpx2.AsyncClient, gpu: SimulatedGpu) -> None:
    """Register a GPU server, and wait until it is usable."""
    told = {"model": "zimg", "server": gpu.name, "endpoint": gpu.url, "slots": gpu.slots}
    assert (await client.post("/admin/register", json=told)).status_code == 200

    async def well() -> Any:
        answer = await client.get("/admin/endpoints")
        return answer.json()["models"][0]["usable"]

    await eventually(well)


async def test_in_each_of_several_processes(
    tmp_path: Path,
    redis_server: RedisServer,
    redis_prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All server processes know the same jobs, and killing one of them loses no job (C1, C23, fault H1)."""
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    words = ("--backend", "redis", "--processes", "2", "--with", "dispatch")
    async with (
        serving(tmp_path, *words, **_DISPATCH) as it,
        SimulatedGpu(name="gpu", slots=2, latency=0.02) as gpu,
        # Each request uses a new connection, so that both processes receive some.
        httpx2.AsyncClient(
            base_url=it.url,
            trust_env=False,
            verify=False,
            timeout=60,
            limits=httpx2.Limits(max_keepalive_connections=0),
        ) as client,
    ):
        await register(client, gpu)
        ids = await submit(client, 20)
        await all_done(client, ids)
        assert gpu.most_at_once <= 2
        os.kill(it.pids()[0], signal.SIGKILL)
        await it.logs("starting another")
        more: list[str] = []
        while len(more) < 10:
            with contextlib.suppress(httpx2.TransportError):
                more += await submit(client, 1)
            await asyncio.sleep(0)
        await all_done(client, more)
        answer = await client.get("/v1/ledger")
        assert answer.json()["balanced"]
        it.send(signal.SIGTERM)
        assert await it.ended() == 0
        assert "Traceback" not in it.log()


async def test_by_the_environment(tmp_path: Path) -> None:
    """A single-process server on the memory backend loads the dispatcher through environment variables alone (C1)."""
    async with (
        serving(tmp_path, "--backend", "memory", extensions="dispatch", **_DISPATCH) as it,
        httpx2.AsyncClient(base_url=it.url, trust_env=False, verify=False) as client,
    ):
        for path in ("/admin/endpoints", "/dispatch"):
            assert (await client.get(path)).status_code == 200
        it.send(signal.SIGTERM)
        assert await it.ended() == 0
