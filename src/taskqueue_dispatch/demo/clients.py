"""Who submits the jobs of a run: over HTTP, as any client, until each is confirmed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2
import msgspec

from taskqueue_cli.demo.cluster import DemoFailed
from taskqueue_core.concurrency import gather_all
from taskqueue_dispatch.demo.plan import DispatchDemoPlan, PlannedJob
from taskqueue_dispatch.demo.server import DemoServer
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu

_AT_ONCE = 8
_RESENT = 20
_NOT_NOW = 503
_LONGEST = 0.5
"""seconds that a client waits for room at the longest, whatever it was told: the run is a short one"""


class _Answer(msgspec.Struct, frozen=True):
    outcome: str
    job_id: str


class Clients:
    """Submits what the plan has; some of it twice."""

    def __init__(self, server: DemoServer, plan: DispatchDemoPlan) -> None:
        self._server = server
        self._plan = plan
        self._client = httpx2.AsyncClient(base_url=server.url, trust_env=False, timeout=30.0)
        self.ids: dict[str, str] = {}
        """the id of each job by its key"""
        self.confirmed: dict[str, float] = {}
        """when each was confirmed, by its id; `time.monotonic`"""
        self.outcomes: Counter[str] = Counter(leased=0, queued=0, no_slots=0)
        self.resent = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    def wanted(self, name: str) -> int:
        """Return how many jobs of a model there are."""
        return sum(job.name == name for job in self._plan.jobs)

    @property
    def with_callback(self) -> int:
        """How many jobs have somebody who is told."""
        return sum(job.callback for job in self._plan.jobs)

    async def register(self, servers: Mapping[str, SimulatedGpu]) -> None:
        """Configure the models and register the servers."""
        for model in self._plan.models:
            body = model.config.model_dump(mode="json", exclude_unset=True)
            await self._ask("PUT", f"/admin/model-configs/{quote(model.model, safe='')}", body)
        for server in self._plan.machines:
            for name, slots in server.slots.items():
                body = {
                    "model": self._plan.model_plan(name).model,
                    "server": server.name,
                    "endpoint": servers[server.name].url,
                    "slots": slots,
                }
                await self._ask("POST", "/admin/register", body)

    async def submit(self) -> None:
        """Submit every job until it is confirmed, and some a second time."""
        jobs = iter(self._plan.jobs)

        async def work() -> None:
            for job in jobs:
                await self._confirm(job)

        await gather_all(work() for _ in range(_AT_ONCE))
        for job in self._plan.jobs[:_RESENT]:
            answer = await self._ask("POST", "/queue/submit", self._body(job))
            if msgspec.json.decode(answer, type=_Answer).job_id != self.ids[job.key]:
                raise DemoFailed("a job that was submitted twice has two ids")
            self.resent += 1

    async def _confirm(self, job: PlannedJob) -> None:
        while True:
            answer = await self._client.post("/queue/submit", json=self._body(job))
            if answer.status_code != _NOT_NOW:
                break
            self.outcomes["no_slots"] += 1
            await asyncio.sleep(min(float(answer.headers.get("retry-after", 1)), _LONGEST))
        if not answer.is_success:
            raise DemoFailed(f"a job was refused: status {answer.status_code}")
        decoded = msgspec.json.decode(answer.content, type=_Answer)
        self.outcomes[decoded.outcome] += 1
        self.ids[job.key] = decoded.job_id
        self.confirmed[decoded.job_id] = time.monotonic()

    def _body(self, job: PlannedJob) -> dict[str, Any]:
        body = {
            "model": self._plan.model_plan(job.name).model,
            "payload": job.payload,
            "priority": job.priority,
            "tenant": job.tenant,
            "idempotency_key": job.key,
        }
        return body | ({"callback_url": self._server.callback_url} if job.callback else {})

    async def _ask(self, method: str, where: str, body: object) -> bytes:
        answer = await self._client.request(method, where, json=body)
        if not answer.is_success:
            raise DemoFailed(f"{method} {where} was answered {answer.status_code}: {answer.text}")
        return answer.content
