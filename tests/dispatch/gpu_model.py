"""A model whose jobs end when the test says so, and a GPU server that runs it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.gpu_server.component import GpuServer
from taskqueue_dispatch.gpu_server.jobs import GpuJob, Handler, JobFailed, JobRefused
from tests.dispatch.gpu_support import SYNC, calling, lease_of, served, task_of
from tests.dispatch.patience import PATIENCE


class Model:
    """A model handler whose jobs run until `end` is called."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.order: list[str] = []
        self.running: set[str] = set()
        self.most = 0
        self._gate = asyncio.Semaphore(0)

    async def __call__(self, job: GpuJob) -> object:
        """Run a job until `end` lets it finish; some payloads make the job fail."""
        self.runs[job.id] += 1
        self.order.append(job.id)
        self.running.add(job.id)
        self.most = max(self.most, len(self.running))
        try:
            await self._gate.acquire()
        finally:
            self.running.discard(job.id)
        if job.payload == "fail":
            raise JobFailed("out of memory")
        if job.payload == "refuse":
            raise JobRefused("no prompt")
        if job.payload == "break":
            raise ValueError("canary of the payload")
        return {"job": job.id, "attempt": job.attempt}

    def end(self, number: int = 1) -> None:
        """Let ``number`` jobs finish; jobs that have not started yet count too."""
        for _ in range(number):
            self._gate.release()


class Served:
    """A running GPU server, with clients that call it as a dispatcher or directly."""

    def __init__(
        self, origin: str, model: Model, caller: EndpointClient, client: httpx2.AsyncClient
    ) -> None:
        self.origin, self.url, self.model = origin, origin + "/generate", model
        self.caller, self.client = caller, client

    async def send(self, job: str = "job-1", payload: object = None, attempt: int = 1) -> Any:
        """Send a job as a dispatcher does, and return the server's answer."""
        task = task_of(job, payload)
        async with asyncio.timeout(PATIENCE):
            return await self.caller.send(lease_of(self.url), task, SYNC, attempt=attempt)

    async def direct(self, job: str | None = None, payload: object = 0) -> httpx2.Response:
        """POST a payload as a direct caller does, without a dispatcher."""
        headers = {"Idempotency-Key": job} if job else {}
        return await self.client.post(self.url, json=payload, headers=headers)

    async def health(self) -> dict[str, Any]:
        """Return the server's health report."""
        found: dict[str, Any] = (await self.client.get(self.origin + "/health")).json()
        return found

    async def status(self, job: str) -> Any:
        """Ask for the status of a job, as a dispatcher does."""
        return await self.caller.ask(self.url, job, SYNC)


@asynccontextmanager
async def serving(handler: Handler | None = None, **options: Any) -> AsyncIterator[Served]:
    """Run a GPU server on a free port, and yield it with its clients."""
    model = Model()
    app = GpuServer(handler or model, **options)
    async with (
        served(app) as origin,
        calling() as caller,
        httpx2.AsyncClient(trust_env=False, verify=False) as client,
    ):
        try:
            yield Served(origin, model, caller, client)
        finally:
            await app.aclose()
