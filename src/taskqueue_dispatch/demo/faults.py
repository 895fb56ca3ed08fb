"""The two faults of a demo run: one server crashes while it runs jobs, another falsely reports that it is idle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taskqueue_cli.demo_frame.view import PlainView
from taskqueue_dispatch.demo.gpu_servers import GpuServers
from taskqueue_dispatch.demo.plan import DispatchDemoPlan
from taskqueue_dispatch.gpu_server.simulator import Mode

_CRASH_AT, _FALSE_REPORT_AT = 0.1, 0.12
"""share of the jobs that has ended when each fault happens"""
_DOWN_SECONDS = 1.0
_FALSE_REPORT_SECONDS = 2.0
_FULL_TIMEOUT = 0.5
"""seconds to wait until all slots of the server are in use; after that, one slot in use is enough"""
_POLL_SECONDS = 0.01


class Faults:
    """Injects two faults, once each. All servers are healthy again when `run` returns."""

    def __init__(self, plan: DispatchDemoPlan, gpu_servers: GpuServers, view: PlainView) -> None:
        self._plan = plan
        self._gpu_servers = gpu_servers
        self._view = view
        self.crashed: frozenset[str] = frozenset()
        """ids of the jobs that were running on the server when it crashed"""
        self.denied: frozenset[str] = frozenset()
        """ids of the jobs that ran on the server while it reported that it was idle"""

    async def run(self, share: Callable[[], float]) -> None:
        """Inject each fault when ``share``, which returns the share of the jobs that have ended, is large enough."""
        await asyncio.gather(self._crash(share), self._report_falsely(share))

    async def _crash(self, share: Callable[[], float]) -> None:
        await _until(lambda: share() >= _CRASH_AT)
        name = self._plan.crashes
        server, running = self._gpu_servers.servers[name], self._gpu_servers.running[name]
        until = time.monotonic() + _FULL_TIMEOUT
        await _until(
            lambda: len(running) == server.slots or (running and time.monotonic() >= until)
        )
        self.crashed = frozenset(running)
        await server.crash()
        self._view.event(f"{name} crashed while running {len(self.crashed)} jobs", "red")
        try:
            await asyncio.sleep(_DOWN_SECONDS)
        finally:
            await server.start()
        self._view.event(f"{name} is up again, without its jobs")

    async def _report_falsely(self, share: Callable[[], float]) -> None:
        await _until(lambda: share() >= _FALSE_REPORT_AT)
        name = self._plan.false_reporter
        server, running = self._gpu_servers.servers[name], self._gpu_servers.running[name]
        server.mode = Mode.LIE_IDLE
        self._view.event(f"{name} now reports that it is idle, although it runs jobs", "red")
        until = time.monotonic() + _FALSE_REPORT_SECONDS
        try:
            while time.monotonic() < until:
                self.denied |= running
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            server.mode = Mode.OK
        self._view.event(f"{name} reports correctly again; it denied {len(self.denied)} jobs")


async def _until(reached: Callable[[], object]) -> None:
    while not reached():  # noqa: ASYNC110 - the simulated servers have no event to wait for
        await asyncio.sleep(_POLL_SECONDS)
