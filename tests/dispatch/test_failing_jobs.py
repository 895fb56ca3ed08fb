"""Tests that a job's own failure is not taken for a failure of its server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taskqueue_core.backend import Backend
from taskqueue_dispatch.endpoint_client.answers import Answer, Done
from taskqueue_dispatch.gpu_server.jobs import GpuJob, JobFailed, JobRefused
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.job_attempt import JobAttempt
from taskqueue_dispatch.job_notes import answer_of
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.status import JobState
from tests.dispatch.patience import until
from tests.dispatch.support import ASKED, dispatching, ended, send, serve

ONCE = ModelConfig(max_retries=0)
POLLED = ModelConfig(
    max_retries=0,
    model_type=ModelType.ASYNC,
    poll_endpoint_template=ASKED,
    poll_interval=0.05,
)


@pytest.mark.parametrize("config", [ONCE, POLLED], ids=["sync", "async"])
async def test_failing_jobs_of_one_tenant(backend: Backend, config: ModelConfig) -> None:
    """Jobs that fail by themselves do not pause their server, so that other tenants lose nothing (U26, fault H5)."""

    async def handle(job: GpuJob) -> None:
        if job.payload["n"] % 2:
            raise JobFailed("the job is at fault")
        raise RuntimeError("the job is at fault")

    async with (
        SimulatedGpu(name="a", slots=1, handler=handle, asynchronous=config is POLLED) as gpu,
        dispatching(backend, breaker_failures=2, breaker_rest=300.0) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=config)
        failing = await send(dispatcher, "flux", 6, tenant="poisonous")
        await ended(dispatcher, failing, JobState.FAILED)
        (info,) = (await dispatcher.pool.inspect("flux")).endpoints
        assert info.resting_until is None
        assert dispatcher.breaker.allows("flux", "a")
        assert sum(gpu.runs.values()) == 6


async def test_a_trial_that_is_refused(backend: Backend) -> None:
    """A server that refuses a job has answered, so that a trial with such a job has passed (U26, fault H5)."""

    async def handle(job: GpuJob) -> int:
        if job.payload["n"] == 0:
            raise JobRefused("no prompt")
        return 1

    async with (
        SimulatedGpu(name="a", slots=1, handler=handle, mode=Mode.ERROR) as gpu,
        dispatching(backend, breaker_failures=1, breaker_rest=0.2) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=ONCE)
        await ended(dispatcher, await send(dispatcher, "flux"), JobState.FAILED)
        assert ("flux", "a") in dispatcher.breaker._circuits
        gpu.mode = Mode.OK
        ids = await send(dispatcher, "flux", 3)
        await ended(dispatcher, ids[:1], JobState.FAILED)
        assert ("flux", "a") not in dispatcher.breaker._circuits
        await ended(dispatcher, ids[1:])


async def test_an_internal_error(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the dispatcher itself is not counted against the server (U26, fault H5)."""
    broken = [3]
    answer = JobAttempt._answer

    async def fails(self: JobAttempt) -> Answer:
        if broken[0]:
            broken[0] -= 1
            raise RuntimeError("broken")
        return await answer(self)

    monkeypatch.setattr(JobAttempt, "_answer", fails)
    async with (
        SimulatedGpu(name="a", slots=1) as gpu,
        dispatching(backend, breaker_failures=1, breaker_rest=300.0) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        await ended(dispatcher, await send(dispatcher, "flux"))
        assert not dispatcher.breaker._circuits


async def test_a_result_whose_ack_fails(backend: Backend) -> None:
    """A result that cannot be acked is kept as a late note in the form of a report (U26, FIX-C8)."""
    async with (
        SimulatedGpu(name="a", slots=1, latency=0.01) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        await until(lambda: "flux" in dispatcher.running)
        runner, _ = dispatcher._runners["flux"]
        ack = runner._settlements.ack

        async def refused(pairs: Any) -> Any:
            return dict.fromkeys(await ack(pairs), False)

        runner._settlements.ack = refused  # type: ignore[method-assign,assignment]
        (job,) = await send(dispatcher, "flux")

        async def kept() -> bool:
            return len(await dispatcher.pool.late("flux", job)) == 1

        await until(kept, "the result is kept as a late note")
        (note,) = await dispatcher.pool.late("flux", job)
        answer = answer_of(note)
        assert isinstance(answer, Done)
        assert json.loads(answer.result)["job_id"] == job
