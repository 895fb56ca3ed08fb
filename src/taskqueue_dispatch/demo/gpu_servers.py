"""The simulated GPU servers of a demo run, and a record of the jobs that they ran."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

from taskqueue_dispatch.demo.plan import DispatchDemoPlan, answer_of
from taskqueue_dispatch.gpu_server.jobs import GpuJob, JobFailed
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.models import ModelType


class GpuServers:
    """The simulated servers of a plan, which the context starts and stops. Times are those of `time.monotonic`."""

    def __init__(self, plan: DispatchDemoPlan, dispatcher: str) -> None:
        """Do not start the servers yet. ``dispatcher`` is the URL to which they push results."""
        self._plan = plan
        self._dispatcher = dispatcher
        self.servers: dict[str, SimulatedGpu] = {}
        self.began: dict[str, float] = {}
        """time at which each job was started for the first time, by job id"""
        self.ended: Counter[str] = Counter()
        """number of completed runs of each job, by job id"""
        self.running: dict[str, set[str]] = defaultdict(set)
        """ids of the running jobs, by name of the server"""
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    async def __aenter__(self) -> Self:
        for machine in self._plan.machines:
            models = [self._plan.model_plan(name) for name in machine.slots]
            server = SimulatedGpu(
                slots=sum(machine.slots.values()),
                asynchronous=any(model.config.model_type is ModelType.ASYNC for model in models),
                name=machine.name,
                dispatcher=self._dispatcher if any(model.pushed for model in models) else None,
                handler=partial(self._run, machine.name),
            )
            self.servers[machine.name] = server
        try:
            await asyncio.gather(*(server.start() for server in self.servers.values()))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def busy(self, servers: Mapping[str, int], since: float, until: float) -> float:
        """Return the share of slot time in which jobs ran.

        ``servers`` gives the number of slots by name of the server.
        """
        slots = sum(servers.values())
        if not slots or until <= since:
            return 0.0
        spent = sum(
            max(0.0, min(end, until) - max(begin, since))
            for server in servers
            for begin, end in self._spans[server]
        )
        return spent / (slots * (until - since))

    async def _end(self) -> None:
        # Stop the servers concurrently, because each waits for the connections that it closes.
        await asyncio.gather(*(server.__aexit__() for server in self.servers.values()))

    async def _run(self, server: str, job: GpuJob) -> dict[str, Any]:
        payload, begin = job.payload, time.monotonic()
        self.began.setdefault(job.id, begin)
        self.running[server].add(job.id)
        try:
            await asyncio.sleep(payload["seconds"])
            fails = payload["fails"]
            if fails < 0 or job.attempt <= fails:
                raise JobFailed("deliberate failure")
        finally:
            self.running[server].discard(job.id)
            self._spans[server].append((begin, time.monotonic()))
        self.ended[job.id] += 1
        return answer_of(payload["prompt"])
