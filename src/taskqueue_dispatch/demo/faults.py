"""What goes wrong midway: a server crashes with jobs in hand, and another one lies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from taskqueue_dispatch.demo.gpu_servers import GpuServers
from taskqueue_dispatch.demo.plan import DispatchDemoPlan
from taskqueue_dispatch.demo.view import View
from taskqueue_dispatch.gpu_server.simulator import Mode

_CRASH_AT, _LIE_AT = 0.1, 0.12
"""the shares of jobs that have ended by then"""
_DOWN_SECONDS = 1.0
_FULL = 0.5
"""seconds for which it is waited until all slots of the server are in use; then some will do"""
_LIES = 2.0
_TICK = 0.01


class Faults:
    """Happen once each. Every server is well again when `run` has ended."""

    def __init__(self, plan: DispatchDemoPlan, gpu_servers: GpuServers, view: View) -> None:
        self._plan = plan
        self._gpu_servers = gpu_servers
        self._view = view
        self.crash: frozenset[str] = frozenset()
        """ids of the jobs that ran on the server that crashed"""
        self.lie: frozenset[str] = frozenset()
        """ids of the jobs that ran on the server that said that it runs none"""

    async def run(self, share: Callable[[], float]) -> None:
        """Let it happen; ``share`` is that of the jobs that have ended."""
        await asyncio.gather(
            self._at(_CRASH_AT, share, self._crash), self._at(_LIE_AT, share, self._lie)
        )

    async def _at(
        self, wanted: float, share: Callable[[], float], happens: Callable[[], Awaitable[None]]
    ) -> None:
        await _until(lambda: share() >= wanted)
        await happens()

    async def _crash(self) -> None:
        name = self._plan.crashes
        server, running = self._gpu_servers.servers[name], self._gpu_servers.running[name]
        until = time.monotonic() + _FULL
        await _until(lambda: len(running) == server.slots or (running and _over(until)))
        self.crash = frozenset(running)
        await server.crash()
        self._view.event(f"{name} crashed with {len(self.crash)} jobs in hand", "red")
        try:
            await asyncio.sleep(_DOWN_SECONDS)
        finally:
            await server.start()
        self._view.event(f"{name} is back, and remembers nothing")

    async def _lie(self) -> None:
        name = self._plan.lies
        server, running = self._gpu_servers.servers[name], self._gpu_servers.running[name]
        server.mode = Mode.LIE_IDLE
        self._view.event(f"{name} says from now on that it is idle", "red")
        observed: set[str] = set()
        try:
            async with asyncio.timeout(_LIES):
                while True:
                    observed |= running
                    await asyncio.sleep(_TICK)
        except TimeoutError:
            pass
        finally:
            server.mode = Mode.OK
            self.lie = frozenset(observed)
        self._view.event(f"{name} tells the truth again, after {len(observed)} jobs that it denied")


def _over(until: float) -> bool:
    return time.monotonic() >= until


async def _until(true: Callable[[], object]) -> None:
    while not true():  # noqa: ASYNC110 - servers tell nobody what they run
        await asyncio.sleep(_TICK)
