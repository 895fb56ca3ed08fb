"""Tests of how a dispatcher stops: in time and with no task left, even if the store is unavailable."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.consumer import settle
from taskqueue_dispatch import job_attempt
from taskqueue_dispatch import model_runner as runner
from taskqueue_dispatch.callbacks import sender
from taskqueue_dispatch.gpu_server.simulator import Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.status import JobState
from tests.dispatch.patience import PATIENCE, until
from tests.dispatch.support import (
    ASKED,
    Gate,
    dispatching,
    ended,
    ledger_of,
    send,
    serve,
    settings,
)
from tests.redis.backends import opened
from tests.redis.conftest import MakeServer
from tests.redis.servers import RedisServer

_PATIENCE = (
    (runner, "_GRACE_SECONDS"), (runner, "_FINAL_SECONDS"), (job_attempt, "_FINAL_SECONDS"), (sender, "_FINAL_SECONDS"),
)  # fmt: skip
"""the timeouts that a stop may spend waiting for the store, one after the other"""
_OURS = ("ModelRunner", "JobAttempt.", "LeaseRenewer", "Checks", "Sender", "Dispatcher")


def _name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", ""))


@pytest.mark.parametrize(
    ("busy", "how"),
    [
        pytest.param(True, "killed", id="busy-killed"),
        pytest.param(False, "frozen", id="idle-frozen"),
        pytest.param(True, "frozen", id="busy-frozen", marks=pytest.mark.long),
        pytest.param(False, "killed", id="idle-killed", marks=pytest.mark.long),
    ],
)
async def test_the_store_is_away(
    how: str, *, busy: bool, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the store, a dispatcher stops within drain plus two seconds and leaves no task (C20, C21, R16)."""
    assert sum(getattr(module, name) for module, name in _PATIENCE) < 2
    # a fifth of each timeout, so that any other wait would be noticed
    for module, name in _PATIENCE:
        monkeypatch.setattr(module, name, getattr(module, name) / 5)
    server: RedisServer = make_server().start()
    config = ModelConfig(
        model_type=ModelType.ASYNC, poll_endpoint_template=ASKED, poll_interval=0.05
    )
    async with (
        SimulatedGpu(name="a", slots=4, latency=30 if busy else 0.01, asynchronous=True) as gpu,
        opened(server.url, "end") as backend,
    ):
        dispatcher = Dispatcher(backend, settings(drain=0.1))
        await dispatcher.__aenter__()
        await serve(dispatcher, "flux", gpu, config=config)
        await serve(dispatcher, "sd", gpu, config=config)
        await send(dispatcher, "flux", 3)
        if busy:
            await until(lambda: gpu.active == 3)
        server.freeze() if how == "frozen" else server.kill()
        try:
            await asyncio.sleep(0.3)
            began = time.monotonic()
            await dispatcher.stop()
            took = time.monotonic() - began
        finally:
            if how == "frozen":
                server.thaw()
            else:
                server.start()
        left = {_name(task) for task in asyncio.all_tasks()}
        assert not {name for name in left if name.startswith(_OURS)}
        assert took < 4, "the stop waited for a response of the store"


async def test_a_stop_that_is_cancelled(backend: Backend) -> None:
    """A stop that is cancelled at any moment leaves no task, and the running jobs continue (C22, R16)."""
    config = ModelConfig(
        model_type=ModelType.ASYNC, poll_endpoint_template=ASKED, poll_interval=0.05
    )
    gate = Gate()
    async with SimulatedGpu(name="a", slots=2, handler=gate, asynchronous=True) as gpu:
        ids: list[str] = []
        for seconds in (0.0, 0.001, 0.01, 0.1):
            dispatcher = Dispatcher(backend, settings(drain=600.0, lease=1.0))
            await dispatcher.__aenter__()
            await serve(dispatcher, "flux", gpu, config=config)
            ids += await send(dispatcher, "flux", 2)
            await until(lambda: gpu.active > 0)
            stopping = asyncio.create_task(dispatcher.stop())
            await asyncio.sleep(seconds)
            stopping.cancel()
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(stopping, return_exceptions=True)
            left = {_name(task) for task in asyncio.all_tasks()}
            assert not {name for name in left if name.startswith(_OURS)}
        gate.open()
        async with dispatching(backend) as heir:
            await ended(heir, ids)
        assert set(gpu.runs.values()) == {1}


async def test_cancelled_before_it_waits_for_its_jobs(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled stop does not wait for jobs, even if the runner's loop has not ended yet (C22, R16)."""
    gate = Gate()
    async with SimulatedGpu(name="a", handler=gate) as gpu:
        dispatcher = Dispatcher(backend, settings(drain=600.0))
        await dispatcher.__aenter__()
        await serve(dispatcher, "flux", gpu)
        await send(dispatcher, "flux")
        await until(lambda: gpu.active == 1)
        runner, _ = dispatcher._runners["flux"]
        stuck = asyncio.Event()

        async def hang() -> None:
            stuck.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(runner, "_pause", hang)
        runner.check_now()
        await stuck.wait()
        stopping = asyncio.create_task(dispatcher.stop())
        await until(runner._stopping.is_set)
        stopping.cancel()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(stopping, return_exceptions=True)
        assert stopping.cancelled()


async def test_done_and_not_settled(backend: Backend) -> None:
    """A job that has run but was not settled before the stop is polled, not run again (FIX-C8, C10, R15)."""
    config = ModelConfig(poll_endpoint_template=ASKED, poll_interval=0.05)
    async with (
        SimulatedGpu(name="a", latency=0.01) as one,
        SimulatedGpu(name="b", latency=0.01) as two,
        dispatching(backend) as dispatcher,
    ):
        await serve(dispatcher, "flux", one, config=config)
        await until(lambda: "flux" in dispatcher.running)
        runner, _ = dispatcher._runners["flux"]
        settlements: Any = runner._settlements
        asked = asyncio.Event()

        async def hang(*_: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        settlements.ack = hang
        ids = await send(dispatcher, "flux")
        await asked.wait()
        await dispatcher.stop()
        async with dispatching(backend) as heir:
            await heir.registry.register("flux", "b", two.url, 1, priority=9)
            await ended(heir, ids)
        assert not two.runs
        assert set(one.runs.values()) == {1}


async def test_many_that_cannot_be_settled(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While too many ended jobs cannot be settled, no more jobs are received (OPEN-C5, C13)."""
    monkeypatch.setattr("taskqueue_dispatch.model_runner._UNSETTLED", 3)
    stuck = asyncio.Event()
    async with (
        SimulatedGpu(name="a", slots=2, latency=0.001) as gpu,
        dispatching(backend, safety_pass=0.02) as dispatcher,
    ):
        await serve(dispatcher, "flux", gpu)
        await until(lambda: "flux" in dispatcher.running)
        runner, _ = dispatcher._runners["flux"]
        settlements: Any = runner._settlements
        ack = settlements.ack
        turns, pause = [0], runner._pause

        async def counted() -> None:
            turns[0] += 1
            await pause()

        monkeypatch.setattr(runner, "_pause", counted)

        async def wait(*words: Any) -> Any:
            await stuck.wait()
            return await ack(*words)

        settlements.ack = wait
        ids = await send(dispatcher, "flux", 30)
        await until(lambda: len(gpu.runs) >= 3)
        so_far = turns[0]
        await until(
            lambda: turns[0] > so_far + 10, "the runner has checked for slots and jobs again"
        )
        assert len(gpu.runs) <= 3 + 2 * 2
        stuck.set()
        await ended(dispatcher, ids)


async def test_stopped_between_report_and_settlement(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop between the report of a job's end and its settlement leaves no job that could end otherwise (U26, C7).

    A second attempt would end as done, and the client would be notified of both ends.
    """
    reported, go = asyncio.Event(), asyncio.Event()

    async def waits(*words: Any) -> Any:
        reported.set()
        await go.wait()
        return await settle.settle(*words)

    monkeypatch.setattr(job_attempt, "settle", waits)
    monkeypatch.setattr(job_attempt, "_FINAL_SECONDS", PATIENCE)
    async with SimulatedGpu(name="a", latency=0.01, mode=Mode.FAIL) as gpu:
        async with dispatching(backend) as dispatcher:
            await serve(dispatcher, "flux", gpu, config=ModelConfig(max_retries=0))
            ids = await send(dispatcher, "flux")
            await reported.wait()
            attempts = tuple(dispatcher._runners["flux"][0]._attempts)
            stopping = asyncio.create_task(dispatcher.stop())
            await until(lambda: all(attempt.cancelling() for attempt in attempts))
            go.set()
            await stopping
        gpu.mode = Mode.OK
        async with dispatching(backend) as heir:
            await ended(heir, ids, JobState.FAILED, within=5.0)
            assert (await ledger_of(backend, "flux")).dead == 1
        assert sum(gpu.runs.values()) == 1
