"""The simulated GPU servers of a demo run: the jobs that they ran, and the faults of two of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

from taskqueue_cli.demo_frame.view import PlainView
from taskqueue_dispatch.demo.plan import CRASHES, FALSE_REPORTER, DispatchDemoPlan, answer_of
from taskqueue_dispatch.gpu_server.jobs import GpuJob, JobFailed
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelType

_CRASH_AT, _FALSE_REPORT_AT = 0.1, 0.12
"""share of all jobs that must have ended before the crash, and before the false report"""
_DOWN_SECONDS = 1.0
_FALSE_REPORT_SECONDS = 2.0
_FULL_TIMEOUT = 0.5
"""seconds to wait, before the crash, until all slots of the server are in use; after that, one used slot is enough"""
_POLL_SECONDS = 0.01


class GpuServers:
    """A context manager that runs the simulated servers of a plan. Times are those of `time.monotonic`."""

    def __init__(self, plan: DispatchDemoPlan, dispatcher: str) -> None:
        """Create the servers without starting them. ``dispatcher`` is the URL to which they push results."""
        self.servers: dict[str, SimulatedGpu] = {}
        for name, slots in plan.machines.items():
            models = [plan.models[model] for model in slots]
            self.servers[name] = SimulatedGpu(
                slots=sum(slots.values()),
                asynchronous=any(model.config.model_type is ModelType.ASYNC for model in models),
                name=name,
                dispatcher=dispatcher if any(model.pushed for model in models) else None,
                handler=partial(self._run, name),
            )
        self.began: dict[str, float] = {}
        """time at which each job was started for the first time, by job id"""
        self.ended: Counter[str] = Counter()
        """number of completed runs of each job, by job id"""
        self.crashed: frozenset[str] = frozenset()
        """ids of the jobs that were running on a server when it crashed"""
        self.denied: frozenset[str] = frozenset()
        """ids of the jobs that ran on a server while it reported that it was idle"""
        self._running: dict[str, set[str]] = defaultdict(set)
        """ids of the running jobs, by name of the server"""
        self._spans: dict[str, list[tuple[float, float]]] = defaultdict(list)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(server.start() for server in self.servers.values()))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # Stop the servers concurrently, because each waits for the connections that it closes.
        await asyncio.gather(*(server.__aexit__() for server in self.servers.values()))

    def busy(self, servers: Mapping[str, int], since: float, until: float) -> float:
        """Return the used share of the slots from ``since`` to ``until``. ``servers`` maps servers to their slots."""
        slots = sum(servers.values())
        if not slots or until <= since:
            return 0.0
        spent = sum(
            max(0.0, min(end, until) - max(begin, since))
            for server in servers
            for begin, end in self._spans[server]
        )
        return spent / (slots * (until - since))

    async def inject_faults(self, share: Callable[[], float], view: PlainView) -> None:
        """Let one server crash, and another report falsely that it is idle. Both work normally when this returns.

        ``share`` returns the share of the jobs that have ended, which decides when the faults happen.
        """
        await asyncio.gather(self._crash(share, view), self._report_falsely(share, view))

    async def _crash(self, share: Callable[[], float], view: PlainView) -> None:
        await _until(lambda: share() >= _CRASH_AT)
        server, running = self.servers[CRASHES], self._running[CRASHES]
        until = time.monotonic() + _FULL_TIMEOUT
        await _until(
            lambda: len(running) == server.slots or (running and time.monotonic() >= until)
        )
        self.crashed = frozenset(running)
        await server.crash()
        view.event(
            f"{CRASHES} crashed; number of jobs that it was running: {len(self.crashed)}", "red"
        )
        try:
            await asyncio.sleep(_DOWN_SECONDS)
        finally:
            await server.start()
        view.event(f"{CRASHES} is up again, without its jobs")

    async def _report_falsely(self, share: Callable[[], float], view: PlainView) -> None:
        await _until(lambda: share() >= _FALSE_REPORT_AT)
        name, server = FALSE_REPORTER, self.servers[FALSE_REPORTER]
        server.mode = Mode.FALSE_IDLE
        view.event(f"{name} now reports that it is idle, although it is running jobs", "red")
        until = time.monotonic() + _FALSE_REPORT_SECONDS
        try:
            while time.monotonic() < until:
                self.denied |= self._running[name]
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            server.mode = Mode.OK
        view.event(
            f"{name} reports correctly again; number of running jobs that it concealed: {len(self.denied)}"
        )

    async def _run(self, server: str, job: GpuJob) -> dict[str, Any]:
        payload, begin = job.payload, time.monotonic()
        self.began.setdefault(job.id, begin)
        self._running[server].add(job.id)
        try:
            await asyncio.sleep(payload["seconds"])
            fails = payload["fails"]
            if fails < 0 or job.attempt <= fails:
                raise JobFailed("deliberate failure")
        finally:
            self._running[server].discard(job.id)
            self._spans[server].append((begin, time.monotonic()))
        self.ended[job.id] += 1
        return answer_of(payload["prompt"])


async def _until(reached: Callable[[], object]) -> None:
    while not reached():  # noqa: ASYNC110 - the simulated servers have no event to wait for
        await asyncio.sleep(_POLL_SECONDS)
