"""Tests of signals, retries, order, results and estimates with a running dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Endpoint, Order, Seen, slots_of
from taskqueue_core.json_text import encode_json
from taskqueue_core.tasks import Task
from taskqueue_dispatch.gpu_server.jobs import GpuJob
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.status import JobState
from taskqueue_dispatch.submit import Queued
from tests.dispatch.patience import until
from tests.dispatch.support import (
    Gate,
    all_free,
    dispatching,
    ended,
    ledger_of,
    send,
    serve,
    settings,
)


class Deaf:
    """A slot signal that is never set."""

    async def wait(self, timeout: float) -> None:
        """Wait until the timeout."""
        await asyncio.sleep(timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("deaf", [False, True], ids=["bell", "safety-pass"])
async def test_a_slot_that_comes_free(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, *, deaf: bool
) -> None:
    """A slot that another holder releases is used at once; without a signal, the periodic check finds it (C19)."""
    pool = slots_of(backend)
    if deaf:
        monkeypatch.setattr(pool, "slot_signal", lambda *_: Deaf())
    async with SimulatedGpu(name="a", slots=1, latency=0.001) as gpu:
        await pool.register(Endpoint(model="flux", server="a", url=gpu.url, slots=1))
        await pool.reconcile("flux", "a", Seen(active=0), settled=0)
        (lease,) = await pool.acquire("flux", "other", ttl=60)
        looks, acquire = [0], pool.acquire

        async def counted(*words: Any, **more: Any) -> Any:
            found = await acquire(*words, **more)
            looks[0] += 1
            return found

        monkeypatch.setattr(pool, "acquire", counted)
        async with dispatching(backend, safety_pass=0.3 if deaf else 60) as dispatcher:
            ids = await send(dispatcher, "flux")
            await until(lambda: looks[0] > 0, "the dispatcher has found no free slot")
            assert not gpu.posts
            await pool.release(lease)
            await ended(dispatcher, ids)


async def test_a_retry_comes_after_its_delay(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed job is retried after 1 s less 10 % jitter, then is a dead letter with a reason (C15, C16, C26)."""
    began: list[float] = []

    async def note(_: GpuJob) -> None:
        began.append(time.monotonic())

    waits: list[float] = []
    publisher, schedule = backend.publisher, backend.publisher.schedule_retry

    async def noted(task: Task, at: float, **more: Any) -> Any:
        waits.append(at - backend.now())
        return await schedule(task, at, **more)

    monkeypatch.setattr(publisher, "schedule_retry", noted)
    async with (
        SimulatedGpu(name="a", handler=note, mode=Mode.FAIL) as gpu,
        Dispatcher(backend, settings(), uniform=lambda: 0.0) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=ModelConfig(max_retries=1))
        ids = await send(dispatcher, "flux")
        await ended(dispatcher, ids, JobState.FAILED)
        (wait,) = waits
        assert wait <= 0.9
        first, second = began
        assert second - first > 0.85
        status = await dispatcher.jobs.status(ids[0])
        assert status is not None
        assert (status.reason, status.error) == ("max_retries_exceeded", "HTTP 500: simulated")
        assert status.attempt == 2
        (letter,) = await dispatcher.jobs.list("flux")
        assert letter.task.id == ids[0]
        assert letter.reason == "max_retries_exceeded"
        assert [one.error for one in letter.history] == ["HTTP 500: simulated"] * 2
        gpu.mode = Mode.OK
        assert await dispatcher.jobs.redrive(ids[0])
        await ended(dispatcher, ids)


@contextlib.asynccontextmanager
async def gated(
    backend: Backend, config: ModelConfig | None = None
) -> AsyncIterator[tuple[Dispatcher, SimulatedGpu, Gate]]:
    """Run a dispatcher with one slot and a job on it that runs until the gate is opened."""
    gate = Gate()
    async with SimulatedGpu(name="a", handler=gate) as gpu, dispatching(backend) as dispatcher:
        await serve(dispatcher, "flux", gpu, config=config)
        await send(dispatcher, "flux")
        await until(lambda: gpu.active == 1)
        try:
            yield dispatcher, gpu, gate
        finally:
            gate.open()


async def test_the_lowest_priority_has_its_share(backend: Backend) -> None:
    """With a backlog of high priority, the lowest priority still gets its floor share (OPEN-C8, C1)."""
    async with gated(backend, ModelConfig(floor_share=0.25)) as (dispatcher, gpu, gate):
        low = await send(dispatcher, "flux", 12, priority=0)
        high = await send(dispatcher, "flux", 24, priority=9)
        gate.open()
        await ended(dispatcher, [*low, *high])
        order = [job for job in gpu.runs if job in {*low, *high}]
        assert 5 <= sum(job in low for job in order[:24]) <= 7
        assert [job for job in order if job in low] == low
        assert [job for job in order if job in high] == high


async def test_the_order_is_swapped_while_jobs_wait(backend: Backend) -> None:
    """Waiting jobs can be switched between first in first out and fair order without loss.

    With fair order tenants take turns (B12, B2, OPEN-B3).
    """
    async with gated(backend) as (dispatcher, gpu, gate):
        many = await send(dispatcher, "flux", 8, tenant="a")
        few = await send(dispatcher, "flux", 2, tenant="b")
        for order in (Order.FAIR, Order.FIFO, Order.FAIR):
            await dispatcher.registry.configure(
                "flux", ModelConfig(order=order, queue_per_slot=1, fair_limit=1)
            )
            assert (await ledger_of(backend, "flux")).waiting == 10
        gate.open()
        await ended(dispatcher, [*many, *few])
        ran = [job for job in gpu.runs if job in {*many, *few}]
        assert set(ran[:4]) == {*many[:2], *few}
        ledger = await ledger_of(backend, "flux")
        assert ledger.balanced
        assert ledger.done == ledger.published == 11


async def test_a_wait_is_estimated(backend: Backend) -> None:
    """A queued job gets an estimate of its waiting time, based on the durations of earlier jobs (B9, C25)."""

    async def queued(dispatcher: Dispatcher) -> Queued:
        told = await dispatcher.submit(Submission(model="flux", payload=b"1"))
        assert isinstance(told, Queued)
        return told

    async with gated(backend) as (dispatcher, _, gate):
        first = await queued(dispatcher)
        assert (first.position, first.estimated_wait) == (0, None)
        gate.open()
        await ended(dispatcher, [first.job_id])
        gate.opened.clear()
        await until(lambda: all_free(backend))
        await send(dispatcher, "flux")
        await until(lambda: dispatcher.running["flux"] == 1)
        waits = [await queued(dispatcher) for _ in range(3)]
        assert [one.position for one in waits] == [0, 1, 2]
        mean = waits[0].estimated_wait
        assert mean is not None
        assert mean > 0
        assert [one.estimated_wait for one in waits] == pytest.approx([mean, 2 * mean, 3 * mean])


async def test_results_are_kept_for_their_time(backend: Backend) -> None:
    """A result is kept for the ``result_ttl`` of the model's configuration, and then deleted (C5, C11)."""
    async with (
        SimulatedGpu(name="a", latency=0.001) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu, config=ModelConfig(result_ttl=60))
        (job_id,) = await send(dispatcher, "flux")
        await ended(dispatcher, [job_id])
        assert await dispatcher.jobs.result(job_id) == encode_json(
            "result", {"server": "a", "job_id": job_id, "attempt": 1}
        )

        await dispatcher.registry.configure("flux", ModelConfig(result_ttl=0.3))
        (other,) = await send(dispatcher, "flux")
        await ended(dispatcher, [other])

        async def gone() -> bool:
            return await dispatcher.jobs.result(other) is None

        await until(gone, "the result is deleted")
        assert await dispatcher.jobs.result(job_id) is not None
        assert (await ledger_of(backend, "flux")).done == 2
