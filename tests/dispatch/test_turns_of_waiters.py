"""Tests that callers waiting for a slot and the jobs of the queue do not starve each other."""

from __future__ import annotations

import asyncio

from taskqueue_core.backend import Backend
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.slot_finder import FoundLeased, FoundQueued, SlotPermit
from tests.dispatch.patience import PATIENCE, until
from tests.dispatch.support import dispatching, ended, send, serve


async def _permit(dispatcher: Dispatcher) -> SlotPermit:
    found = await dispatcher.finder.find_endpoint("flux", timeout=60)
    if isinstance(found, FoundLeased):
        return found.permit
    assert isinstance(found, FoundQueued)
    return await found


async def test_jobs_get_slots_too(backend: Backend) -> None:
    """While callers wait for the only slot all the time, jobs of the queue still run (B10, B11)."""

    async def ask_on() -> None:
        while True:
            async with await _permit(dispatcher):
                await asyncio.sleep(0.01)

    async with (
        SimulatedGpu(name="a", slots=1, latency=0.01) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        asking = [asyncio.create_task(ask_on()) for _ in range(4)]
        await until(lambda: dispatcher.waiters.wanting("flux") > 1)
        await ended(dispatcher, await send(dispatcher, "flux", 5))
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_slots_that_no_job_wants(backend: Backend) -> None:
    """Waiting callers get all free slots at once if the queue has no jobs (B10, C19)."""
    async with (
        SimulatedGpu(name="a", slots=4, latency=0.01) as gpu,
        dispatching(backend, safety_pass=60.0, lease=60.0) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        held = [await _permit(dispatcher) for _ in range(4)]
        waiting = [asyncio.create_task(_permit(dispatcher)) for _ in range(4)]
        await until(lambda: dispatcher.waiters.wanting("flux") == 4)
        await dispatcher.pool.release(*(permit._held.lease for permit in held))
        async with asyncio.timeout(PATIENCE):
            permits = await asyncio.gather(*waiting)
        for permit in permits:
            await permit.release()
        await ended(dispatcher, await send(dispatcher, "flux"))
