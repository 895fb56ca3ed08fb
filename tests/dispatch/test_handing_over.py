"""Tests of jobs and slots when dispatchers stop, servers change, or servers report falsely."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.consumer import maintenance
from taskqueue_dispatch.gpu_server.jobs import GpuJob
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.status import JobState
from tests.dispatch.patience import until
from tests.dispatch.support import ASKED, Gate, dispatching, ended, ledger_of, send, serve

TOLD = ModelConfig(poll_endpoint_template=ASKED, poll_interval=0.05, max_poll_time=60)


async def test_a_dispatcher_that_stops_leaves_its_jobs_running(backend: Backend) -> None:
    """When a dispatcher stops, another one takes over its running job, and no job runs twice (C23, fault H2)."""
    gate = Gate()
    async with SimulatedGpu(name="a", slots=1, handler=gate) as gpu:
        async with dispatching(backend) as first:
            await serve(first, "flux", gpu, config=TOLD)
            ids = await send(first, "flux", 2)
            await until(lambda: gpu.active == 1)
        view = await first.pool.inspect("flux")
        assert [lease.state for lease in view.leases] == ["detached"]
        async with dispatching(backend) as second:
            gate.open()
            await ended(second, ids)
        assert set(gpu.runs.values()) == {1}
        assert gpu.most_at_once == 1


async def test_several_dispatchers_share_the_slots(backend: Backend) -> None:
    """Two dispatchers share the slots of a server: each job runs once, and no slot is used twice (R16, fault H1)."""
    async with (
        SimulatedGpu(name="a", slots=2, latency=(0.001, 0.02)) as gpu,
        dispatching(backend) as first,
        dispatching(backend) as second,
    ):
        await serve(first, "flux", gpu)
        ids = [*await send(first, "flux", 30), *await send(second, "flux", 30)]
        await ended(second, ids)
        assert set(gpu.runs.values()) == {1}
        assert gpu.most_at_once == 2
        assert gpu.refused == 0


async def test_a_server_that_reports_itself_idle(backend: Backend) -> None:
    """If a server falsely reports that it is idle, the job loses its slot and is sent again.

    The server does not run it twice (fault H4).
    """
    gate = Gate()
    async with (
        SimulatedGpu(name="a", slots=1, handler=gate) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=TOLD)
        ids = await send(dispatcher, "flux")
        await until(lambda: gpu.active == 1)
        gpu.mode = Mode.FALSE_IDLE

        async def lost() -> bool:
            status = await dispatcher.jobs.status(ids[0])
            return status is not None and status.losses > 0

        await until(lost, "the job has lost its slot")
        gate.open()
        await ended(dispatcher, ids)
        assert gpu.runs[ids[0]] == 1
        assert gpu.most_at_once == 1


async def test_a_server_that_hangs(backend: Backend) -> None:
    """A job fails once its ``max_poll_time`` is over, with an error that says so (C18, OPEN-C3)."""
    config = TOLD.model_copy(update={"max_poll_time": 0.3, "max_retries": 0})
    async with (
        SimulatedGpu(name="a", slots=1, latency=30) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=config)
        began = time.monotonic()
        ids = await send(dispatcher, "flux")
        await ended(dispatcher, ids, JobState.FAILED)
        assert time.monotonic() - began >= 0.3
        status = await dispatcher.jobs.status(ids[0])
        assert status is not None
        assert "Exceeded max processing time" in str(status)


async def test_a_job_longer_than_the_lease(backend: Backend) -> None:
    """A job that runs longer than a slot's lease keeps its slot until its end (C21, FIX-C7, OPEN-C3)."""
    gate = Gate()
    async with (
        SimulatedGpu(name="a", slots=1, handler=gate) as gpu,
        dispatching(backend, lease=0.4) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        ids = await send(dispatcher, "flux", 2)
        await until(lambda: gpu.active == 1)
        (first,) = (await dispatcher.pool.inspect("flux")).leases

        async def renewed() -> bool:
            (lease,) = (await dispatcher.pool.inspect("flux")).leases
            return lease.job == first.job and lease.expires_at > first.expires_at + 2 * 0.4

        await until(renewed, "the job has its slot for longer than two leases")
        gate.open()
        await ended(dispatcher, ids)
        assert set(gpu.runs.values()) == {1}
        assert gpu.most_at_once == 1


async def test_slots_are_taken_away_and_a_server_removed(backend: Backend) -> None:
    """Jobs on a server that loses slots or is removed are finished there, but it gets no new ones (fault H7)."""
    gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def handle(job: GpuJob) -> None:
        await gates[job.id].wait()

    async with (
        SimulatedGpu(name="one-1", slots=2, handler=handle) as old,
        SimulatedGpu(name="two-2", slots=1, latency=0.01) as new,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "sd-xl-1.0", old)
        first = await send(dispatcher, "sd-xl-1.0", 2)
        await until(lambda: old.active == 2)
        await dispatcher.registry.register("sd-xl-1.0", "one-1", old.url, 1)
        more = await send(dispatcher, "sd-xl-1.0", 2)
        for job in first:
            gates[job].set()
        await ended(dispatcher, first)
        await until(lambda: more[0] in old.runs, "another job runs on the remaining slot")
        await dispatcher.registry.remove("sd-xl-1.0", "one-1")
        await serve(dispatcher, "sd-xl-1.0", new)
        await ended(dispatcher, more[1:])
        gates[more[0]].set()
        await ended(dispatcher, more)
        assert sum(old.runs.values()) == 3
        assert sum(new.runs.values()) == 1
        view = await dispatcher.pool.inspect("sd-xl-1.0")
        assert [info.endpoint.server for info in view.endpoints] == ["two-2"]


async def test_a_deadline_that_passes_in_the_queue(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose deadline passes while it waits ends as expired, and is not sent (C26, law 8)."""
    monkeypatch.setattr(maintenance, "_EVERY", 0.1)
    gate = Gate()
    async with (
        SimulatedGpu(name="a", slots=1, handler=gate) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        first = await send(dispatcher, "flux")
        await until(lambda: gpu.active == 1)
        late = await send(dispatcher, "flux", deadline=backend.now() + 0.1)
        await ended(dispatcher, late, JobState.EXPIRED)
        gate.open()
        await ended(dispatcher, first)
        assert late[0] not in gpu.runs
    assert (await ledger_of(backend, "flux")).balanced


async def test_priorities(backend: Backend) -> None:
    """Higher priorities run first, and jobs of one priority in order of submission (C14, FIX-C1, OPEN-C6)."""
    gate = Gate()
    async with (
        SimulatedGpu(name="a", slots=1, handler=gate) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        (first,) = await send(dispatcher, "flux")
        await until(lambda: gpu.active == 1)
        low = await send(dispatcher, "flux", 3, priority=1)
        high = await send(dispatcher, "flux", 3, priority=9)
        gate.open()
        await ended(dispatcher, [*low, *high])
        assert list(gpu.runs) == [first, *high, *low]


async def test_a_job_that_has_ended_between_two_questions(backend: Backend) -> None:
    """A job may end between two polls, so that a health report frees its slot.

    It is then done, and no loss is counted (C4, C22, FIX-C5).
    """
    config = TOLD.model_copy(update={"model_type": ModelType.ASYNC, "poll_interval": 4.0})
    async with (
        SimulatedGpu(name="a", slots=1, latency=0.05, asynchronous=True) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=config)
        ids = await send(dispatcher, "flux")
        await ended(dispatcher, ids)
        status = await dispatcher.jobs.status(ids[0])
        assert status is not None
        assert status.losses == 0
        assert set(gpu.runs.values()) == {1}
