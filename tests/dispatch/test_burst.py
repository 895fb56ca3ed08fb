"""A burst of jobs through a proxy that loses requests and responses: no job is lost and none runs twice."""

from __future__ import annotations

import asyncio
import os
from functools import partial

import httpx2

from taskqueue_core.backend import Backend
from taskqueue_dispatch.client import submit_until_confirmed
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.models import ModelConfig
from tests.dispatch.api import Api, serving
from tests.dispatch.fronts import Flaky, Reply, reply
from tests.dispatch.patience import until
from tests.dispatch.support import ledger_of

JOBS = int(os.environ.get("TASKQUEUE_BURST_JOBS", "500"))
CLIENTS = 50


async def pass_on(api: Api, body: bytes) -> Reply:
    """Forward a request from the proxy to the server."""
    headers = {"content-type": "application/json"}
    answer = await api.client.post("/queue/submit", content=body, headers=headers, timeout=60)
    after = answer.headers.get("retry-after")
    lines = [] if after is None else [f"retry-after: {after}"]
    return reply(answer.status_code, answer.content, *lines)


async def test_a_burst_of_jobs(backend: Backend) -> None:
    """Each job runs once in spite of 5 % errors 502 and 1 % cut responses (OPEN-C1, C9, C25, C26, law 7)."""
    config = ModelConfig(queue_per_slot=JOBS, queue_limit=200)
    async with (
        SimulatedGpu(name="a", slots=32, latency=0.001) as first,
        SimulatedGpu(name="b", slots=32, latency=0.001) as second,
        # Use the default of ``settled``: under this load a job may be on its way for longer than the other tests allow.
        serving(backend, settled=5.0) as api,
        Flaky(partial(pass_on, api), refused=0.05, cut=0.01, seed=1) as front,
    ):
        await api.dispatcher.registry.configure("flux", config)
        await api.register("flux", first, second)
        numbers = iter(range(JOBS))
        confirmed: dict[str, str] = {}

        async def client() -> None:
            async with httpx2.AsyncClient(verify=False, timeout=60) as http:
                for number in numbers:
                    told = {"model": "flux", "payload": {"n": number}}
                    found = await submit_until_confirmed(http, front.url, told)
                    confirmed[found.idempotency_key] = found.answer["job_id"]

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
        assert len(confirmed) == len(set(confirmed.values())) == JOBS

        async def done() -> bool:
            return (await ledger_of(backend, "flux")).done == JOBS

        await until(done, "every job is done", within=max(60, JOBS / 50))
        ledger = await ledger_of(backend, "flux")
        assert ledger.balanced
        assert ledger.published == JOBS
        runs = first.runs + second.runs
        assert set(runs) == set(confirmed.values())
        assert set(runs.values()) == {1}
        assert front.count["refused"] > 0
        assert front.count["cut"] > 0
