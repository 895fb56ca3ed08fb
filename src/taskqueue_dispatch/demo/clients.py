"""The clients of a demo run, which submit jobs over HTTP until each is confirmed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import httpx2

from taskqueue_cli.demo_frame.run import DemoFailed
from taskqueue_core.concurrency import gather_all
from taskqueue_dispatch.client import Confirmed, submit_until_confirmed
from taskqueue_dispatch.demo.plan import DispatchDemoPlan, PlannedJob
from taskqueue_dispatch.demo.server import DemoServer

_MAX_CONCURRENT = 8
_RESENT = 20
_MAX_TRIES, _MAX_SECONDS = 100_000, 3600.0
"""maximum number of tries and of seconds for submitting one job, high enough for a long run with a full queue"""
_MAX_PAUSE = 0.5
"""longest wait in seconds before a retry, even if ``Retry-After`` is longer, because the run is short"""


class Clients:
    """The clients that submit all jobs of a plan, some of them twice."""

    def __init__(self, server: DemoServer, plan: DispatchDemoPlan) -> None:
        self._server = server
        self._plan = plan
        self.ids: dict[str, str] = {}
        """the id of each job by its idempotency key"""
        self.confirmed: dict[str, float] = {}
        """time of each job's confirmation (`time.monotonic`), by job id"""
        self.outcomes: Counter[str] = Counter(leased=0, queued=0, no_slots=0)
        self.resent = 0

    async def submit(self) -> None:
        """Submit every job until it is confirmed. Submit some of the jobs a second time."""
        jobs = iter(self._plan.jobs)
        async with httpx2.AsyncClient(trust_env=False, timeout=30.0) as client:

            async def work() -> None:
                for job in jobs:
                    confirmed = await self._submit(client, job)
                    job_id = confirmed.answer["job_id"]
                    self.outcomes[confirmed.answer["outcome"]] += 1
                    self.outcomes["no_slots"] += confirmed.tries - 1
                    self.ids[job.key] = job_id
                    self.confirmed[job_id] = time.monotonic()

            await gather_all(work() for _ in range(_MAX_CONCURRENT))
            for job in self._plan.jobs[:_RESENT]:
                confirmed = await self._submit(client, job)
                if confirmed.answer["job_id"] != self.ids[job.key]:
                    raise DemoFailed("a job that was submitted twice got two ids")
                self.resent += 1

    async def _submit(self, client: httpx2.AsyncClient, job: PlannedJob) -> Confirmed:
        body = {
            "model": self._plan.models[job.name].model,
            "payload": {"prompt": job.prompt, "seconds": job.seconds, "fails": job.fails},
            "priority": job.priority,
            "tenant": job.tenant,
            "idempotency_key": job.key,
            "callback_url": self._server.receiver.url if job.callback else None,
        }
        return await submit_until_confirmed(
            client,
            f"{self._server.url}/queue/submit",
            body,
            attempts=_MAX_TRIES,
            deadline=_MAX_SECONDS,
            sleep=lambda seconds: asyncio.sleep(min(seconds, _MAX_PAUSE)),
        )
