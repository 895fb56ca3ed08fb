"""The clients of a demo run, which submit jobs over HTTP until each is confirmed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote

import httpx2
import msgspec

from taskqueue_cli.demo_frame.run import DemoFailed
from taskqueue_core.concurrency import gather_all
from taskqueue_dispatch.demo.plan import DispatchDemoPlan, PlannedJob
from taskqueue_dispatch.demo.server import DemoServer
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu

_MAX_CONCURRENT = 8
_RESENT = 20
_UNAVAILABLE = 503
_MAX_RETRY_SECONDS = 0.5
"""longest wait in seconds before a retry, even if ``Retry-After`` is longer, because the run is short"""


class _Answer(msgspec.Struct, frozen=True):
    outcome: str
    job_id: str


class Clients:
    """Submits every job of a plan, and some of the jobs twice."""

    def __init__(self, server: DemoServer, plan: DispatchDemoPlan) -> None:
        self.server = server
        self.plan = plan
        self._client = httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=30.0)
        self.ids: dict[str, str] = {}
        """the id of each job by its idempotency key"""
        self.confirmed: dict[str, float] = {}
        """time of each job's confirmation (`time.monotonic`), by job id"""
        self.outcomes: Counter[str] = Counter(leased=0, queued=0, no_slots=0)
        self.resent = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def register(self, servers: Mapping[str, SimulatedGpu]) -> None:
        """Configure the models and register the servers."""
        for model in self.plan.models:
            body = model.config.model_dump(mode="json", exclude_unset=True)
            await self._request("PUT", f"/admin/model-configs/{quote(model.model, safe='')}", body)
        for server in self.plan.machines:
            for name, slots in server.slots.items():
                body = {
                    "model": self.plan.model_plan(name).model,
                    "server": server.name,
                    "endpoint": servers[server.name].url,
                    "slots": slots,
                }
                await self._request("POST", "/admin/register", body)

    async def submit(self) -> None:
        """Submit every job until it is confirmed. Submit some of the jobs a second time."""
        jobs = iter(self.plan.jobs)

        async def work() -> None:
            for job in jobs:
                await self._confirm(job)

        await gather_all(work() for _ in range(_MAX_CONCURRENT))
        for job in self.plan.jobs[:_RESENT]:
            answer = await self._request("POST", "/queue/submit", self._body(job))
            if msgspec.json.decode(answer, type=_Answer).job_id != self.ids[job.key]:
                raise DemoFailed("a job that was submitted twice got two ids")
            self.resent += 1

    async def _confirm(self, job: PlannedJob) -> None:
        while True:
            answer = await self._client.post("/queue/submit", json=self._body(job))
            if answer.status_code != _UNAVAILABLE:
                break
            self.outcomes["no_slots"] += 1
            await asyncio.sleep(
                min(float(answer.headers.get("retry-after", 1)), _MAX_RETRY_SECONDS)
            )
        if not answer.is_success:
            raise DemoFailed(f"a job was refused: status {answer.status_code}")
        decoded = msgspec.json.decode(answer.content, type=_Answer)
        self.outcomes[decoded.outcome] += 1
        self.ids[job.key] = decoded.job_id
        self.confirmed[decoded.job_id] = time.monotonic()

    def _body(self, job: PlannedJob) -> dict[str, Any]:
        body = {
            "model": self.plan.model_plan(job.name).model,
            "payload": job.payload,
            "priority": job.priority,
            "tenant": job.tenant,
            "idempotency_key": job.key,
        }
        return body | ({"callback_url": self.server.callback_url} if job.callback else {})

    async def _request(self, method: str, path: str, body: object) -> bytes:
        answer = await self._client.request(method, path, json=body)
        if not answer.is_success:
            raise DemoFailed(
                f"{method} {path} failed with status {answer.status_code}: {answer.text}"
            )
        return answer.content
