"""Tests of jobs from submission to their end, on simulated GPU servers."""

from __future__ import annotations

import asyncio

import pytest

from taskqueue_core.backend import Backend
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.remote_job import RemoteJob
from tests.dispatch.patience import until
from tests.dispatch.support import ASKED, Gate, all_free, dispatching, ended, ledger_of, send, serve

POLLED = ModelConfig(
    model_type=ModelType.ASYNC, poll_endpoint_template=ASKED, poll_interval=0.05, max_poll_time=60
)


SHORT = ModelConfig(max_poll_time=0.2, poll_interval=0.05, max_retries=0)
SHORT_POLLED = POLLED.model_copy(update={"max_poll_time": 0.2, "max_retries": 0})


async def test_jobs_are_done_once_each(backend: Backend) -> None:
    """Each job of a burst runs once, all slots are used at the same time, and the ledger balances (C1, C26, R16)."""
    gate = Gate()

    async def sleep(seconds: float) -> None:
        await gate.opened.wait()
        await asyncio.sleep(seconds)

    async with (
        SimulatedGpu(name="a", slots=2, latency=(0.001, 0.01), sleep=sleep) as first,
        SimulatedGpu(name="b", slots=3, latency=(0.001, 0.01), sleep=sleep) as second,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", first, second)
        ids = await send(dispatcher, "flux", 100)
        await until(lambda: (first.active, second.active) == (2, 3), "every slot has a job")
        gate.open()
        await ended(dispatcher, ids)
        runs = first.runs + second.runs
        assert set(runs) == set(ids)
        assert set(runs.values()) == {1}
        assert (first.most_at_once, first.refused) == (2, 0)
        assert (second.most_at_once, second.refused) == (3, 0)
        await until(lambda: all_free(backend), "all slots are free")
    ledger = await ledger_of(backend, "flux")
    assert ledger.balanced
    assert ledger.done == ledger.published == 100


async def test_jobs_of_an_asynchronous_model(backend: Backend) -> None:
    """A job of an asynchronous model is polled until it has a result, and keeps its slot until then (C3, C4)."""
    gate = Gate()
    async with (
        SimulatedGpu(name="a", slots=2, handler=gate, asynchronous=True) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "trellis", gpu, config=POLLED)
        ids = await send(dispatcher, "trellis", 6)
        await until(lambda: gpu.active == 2)
        view = await dispatcher.pool.inspect("trellis")
        assert view.endpoints[0].held == 2
        gate.open()
        await ended(dispatcher, ids)
        assert set(gpu.runs.values()) == {1}
        assert gpu.most_at_once == 2
        await until(lambda: all_free(backend), "all slots are free")


async def test_a_busy_server_costs_no_attempt(backend: Backend) -> None:
    """A job that a busy server refuses goes to another server, as the same attempt (FIX-C3, law 3, fault H5)."""
    async with (
        SimulatedGpu(name="busy", slots=4, mode=Mode.BUSY) as busy,
        SimulatedGpu(name="idle", slots=1, latency=0.01) as idle,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", busy, idle)
        ids = await send(dispatcher, "flux", 12)
        await ended(dispatcher, ids)
        assert busy.refused > 0
        assert set(idle.runs) == set(ids)
        for job_id in ids:
            status = await dispatcher.jobs.status(job_id)
            assert status is not None
            assert status.attempt == 1


async def test_direct_traffic_takes_all(backend: Backend) -> None:
    """While direct callers occupy a server, jobs wait without using up attempts, then run (fault H8, FIX-C3)."""
    async with (
        SimulatedGpu(name="a", slots=1, mode=Mode.BUSY, latency=0.001) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        ids = await send(dispatcher, "flux", 3)
        await until(lambda: gpu.refused >= 5)
        gpu.mode = Mode.OK
        await ended(dispatcher, ids)
        statuses = [await dispatcher.jobs.status(job_id) for job_id in ids]
        assert all(status is not None and status.attempt == 1 for status in statuses)


async def test_a_server_that_crashes_with_a_job(backend: Backend) -> None:
    """The job of a server that crashes is sent again, and its slot is freed (C23, fault H4)."""
    config = ModelConfig(poll_endpoint_template=ASKED, poll_interval=0.05)
    gate = Gate()
    async with (
        SimulatedGpu(name="a", slots=1, handler=gate) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=config)
        ids = await send(dispatcher, "flux", 2)
        await until(lambda: gpu.active == 1)
        await gpu.crash_and_restart()
        gate.open()
        await ended(dispatcher, ids)
        assert sum(gpu.runs.values()) == 3
        assert gpu.most_at_once == 1
        await until(lambda: all_free(backend), "all slots are free")


@pytest.mark.parametrize("reports", [True, False], ids=["reports", "no-reports"])
@pytest.mark.parametrize("config", [SHORT, SHORT_POLLED], ids=["sync", "async"])
async def test_waiting_for_a_connection(
    backend: Backend, config: ModelConfig, monkeypatch: pytest.MonkeyPatch, *, reports: bool
) -> None:
    """The time that a job waits for a connection or its slot does not count for max_poll_time (U26, C18).

    The first attempt waits twice as long. The job runs once, and uses up no retry.
    """
    confirm, waits = RemoteJob._confirm_slot, [2 * config.max_poll_time]

    async def confirm_late(self: RemoteJob) -> None:
        if waits:
            await asyncio.sleep(waits.pop())
        await confirm(self)

    monkeypatch.setattr(RemoteJob, "_confirm_slot", confirm_late)
    async with (
        SimulatedGpu(latency=0.05, asynchronous=config is SHORT_POLLED) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await dispatcher.registry.configure("flux", config)
        await dispatcher.registry.register("flux", "a", gpu.url, 1, reports=reports)
        await ended(dispatcher, await send(dispatcher, "flux"))
        assert set(gpu.runs.values()) == {1}
