"""Tests of the simulated GPU server, whose modes imitate the faults of real ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from functools import partial

import httpx2
import pytest

from taskqueue_dispatch.endpoint_client.answers import (
    Answer,
    Busy,
    Done,
    EndpointUnreachable,
    JobAcceptedAnswer,
    JobFailedAnswer,
    JobRunningAnswer,
    Missing,
)
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.gpu_server.__main__ import main
from taskqueue_dispatch.gpu_server.simulator import CONTROL, Mode, SimulatedGpu
from taskqueue_dispatch.models import ModelConfig
from tests.dispatch.gpu_support import ASYNC, SYNC, calling, endpoint_of, lease_of, task_of
from tests.dispatch.patience import PATIENCE, until

SHORT = SYNC.model_copy(update={"max_poll_time": 0.3})


@pytest.fixture
async def caller() -> AsyncIterator[EndpointClient]:
    """Yield an endpoint client."""
    async with calling() as it:
        yield it


async def send(
    caller: EndpointClient,
    gpu: SimulatedGpu,
    job: str = "job-1",
    attempt: int = 1,
    config: ModelConfig = SYNC,
) -> Answer:
    """Send a job to the simulated server."""
    return await caller.send(lease_of(gpu.url), task_of(job), config, attempt=attempt)


class TestModes:
    """Each mode, as a client sees it."""

    async def test_ok(self, caller: EndpointClient) -> None:
        """In mode OK the server runs as many jobs at once as it has slots, and counts them (C2, C3)."""
        async with SimulatedGpu(slots=2, latency=0.05, name="a") as gpu:
            answers = await asyncio.gather(*(send(caller, gpu, f"j{n}") for n in range(3)))
            assert sorted(type(answer).__name__ for answer in answers) == ["Busy", "Done", "Done"]
            assert Done(b'{"server":"a","job_id":"j0","attempt":1}') in answers
            assert (gpu.posts, gpu.refused, gpu.most_at_once, gpu.active) == (3, 1, 2, 0)
            assert gpu.runs.total() == gpu.finished.total() == 2

    async def test_switching(self, caller: EndpointClient) -> None:
        """The mode can be changed while the server runs (fault H5)."""
        async with SimulatedGpu(latency=0) as gpu:
            found = []
            for mode in (Mode.OK, Mode.BUSY, Mode.ERROR, Mode.BAD_GATEWAY, Mode.FAIL, Mode.GARBAGE):
                gpu.mode = mode
                found.append(type(await send(caller, gpu, f"job-{mode}")))
            assert found == [
                Done,
                Busy,
                JobFailedAnswer,
                EndpointUnreachable,
                JobFailedAnswer,
                JobFailedAnswer,
            ]
            assert gpu.runs == {"job-ok": 1, "job-fail": 1}
            assert gpu.finished == {"job-ok": 1}
            gpu.mode = Mode.OK
            assert isinstance(await send(caller, gpu, "job-fail", attempt=2), Done)

    @pytest.mark.parametrize("mode", [Mode.HANG, Mode.DRIP])
    async def test_without_end(self, mode: Mode) -> None:
        """In the modes HANG and DRIP a response never arrives, or never ends (fault H5)."""
        patience = 0.3 if mode is Mode.HANG else PATIENCE
        async with (
            SimulatedGpu(latency=0, mode=mode) as gpu,
            calling(health_interval=patience) as caller,
        ):
            assert isinstance(await send(caller, gpu, config=SHORT), JobFailedAnswer)
            assert gpu.runs.total() == (mode is Mode.DRIP)
            seen = await caller.health(endpoint_of(gpu.url), SYNC)
            assert (seen is None) == (mode is Mode.HANG)

    async def test_a_false_report_of_idle(self, caller: EndpointClient) -> None:
        """In mode FALSE_IDLE the server reports no active jobs while a job runs (C22, C23, fault H4)."""
        async with SimulatedGpu(latency=30, asynchronous=True) as gpu:
            sent = await caller.send(lease_of(gpu.url), task_of(), ASYNC, attempt=1)
            assert sent == JobAcceptedAnswer("job-1")
            for mode, active in [(Mode.OK, 1), (Mode.FALSE_IDLE, 0), (Mode.OK, 1)]:
                gpu.mode = mode
                seen = await caller.health(endpoint_of(gpu.url), SYNC)
                assert seen is not None
                assert seen.active == active
                assert await caller.ask(gpu.url, "job-1", SYNC) == JobRunningAnswer()
            gpu.mode = Mode.SICK
            assert await caller.health(endpoint_of(gpu.url), SYNC) is None

    async def test_a_false_report_of_done(self, caller: EndpointClient) -> None:
        """In mode FALSE_DONE the server reports success for a job that it never ran (fault H5)."""
        async with SimulatedGpu(mode=Mode.FALSE_DONE) as gpu:
            assert await send(caller, gpu) == Done(b'{"lie":true}')
            assert not gpu.runs

    async def test_direct_traffic_takes_all(self, caller: EndpointClient) -> None:
        """While direct calls occupy every slot, a dispatcher's job is refused (fault H8, C2)."""
        go = asyncio.Event()

        async def wait(_: float) -> None:
            await go.wait()

        async with (
            SimulatedGpu(slots=2, sleep=wait) as gpu,
            httpx2.AsyncClient(verify=False) as client,
        ):
            for _ in range(6):
                assert (await client.post(gpu.url, json=0)).status_code == 200
            for _ in range(5):
                assert isinstance(await send(caller, gpu), Busy)
            go.set()
            await until(lambda: gpu.finished.total() == 6)
            assert isinstance(await send(caller, gpu), Done)


class TestCrashes:
    """Crashes, and ends in the middle of a call."""

    async def test_crash(self, caller: EndpointClient) -> None:
        """A crash breaks all connections, and the restarted server has forgotten its jobs (C23, fault H4)."""
        async with SimulatedGpu(latency=30) as gpu:
            call = asyncio.create_task(caller.send(lease_of(gpu.url), task_of(), SYNC, attempt=1))
            await until(lambda: gpu.active == 1)
            port = gpu.port
            await gpu.crash()
            answer = await call
            assert isinstance(answer, EndpointUnreachable)
            assert answer.sent
            assert gpu.active == 0
            gone = await send(caller, gpu)
            assert isinstance(gone, EndpointUnreachable)
            assert not gone.sent
            gpu.latency = 0
            await gpu.start()
            await gpu.start()
            assert gpu.port == port
            seen = await caller.health(endpoint_of(gpu.url), SYNC)
            assert seen is not None
            assert (seen.active, seen.jobs) == (0, frozenset())
            assert await caller.ask(gpu.url, "job-1", SYNC) == Missing()
            assert isinstance(await send(caller, gpu), Done)
            assert (gpu.runs["job-1"], gpu.finished["job-1"], gpu.crashes) == (2, 1, 1)

    async def test_over_the_wire(self, caller: EndpointClient) -> None:
        """A test in another process can set the mode, read the counts and cause a crash over HTTP (fault H4)."""
        async with SimulatedGpu(latency=0) as gpu, httpx2.AsyncClient(verify=False) as client:
            await send(caller, gpu)
            control = gpu.origin + CONTROL
            assert (await client.get(control)).json()["runs"] == {"job-1": 1}
            told = await client.put(control, json={"mode": "busy"})
            assert told.json()["mode"] == "busy"
            assert isinstance(await send(caller, gpu), Busy)
            bodies: list[object] = [{"mode": "canary"}, {}, [], 7]
            for body in bodies:
                answer = await client.put(control, json=body)
                assert answer.status_code == 422
                assert "canary" not in answer.text
            assert gpu.mode is Mode.BUSY
            gpu.mode = Mode.OK
            await client.delete(control)
            await until(lambda: gpu.crashes == 1 and gpu._program is not None)
            assert await caller.ask(gpu.url, "job-1", SYNC) == Missing()

    async def test_in_every_mode(self, caller: EndpointClient) -> None:
        """The server can be crashed at once in every mode (fault H5)."""
        for mode in Mode:
            async with SimulatedGpu(latency=600) as gpu, asyncio.timeout(PATIENCE):
                gpu.mode = mode
                call = asyncio.create_task(
                    caller.send(lease_of(gpu.url), task_of(), SYNC, attempt=1)
                )
                await until(partial(lambda one: one.posts == 1, gpu))
                await gpu.crash()
                await call


async def test_latencies_repeat() -> None:
    """The durations of jobs are random within a range, and repeatable with the same seed (C3)."""
    seen: list[list[float]] = []
    for seed in (1, 1, 2):
        times: list[float] = []

        async def sleep(seconds: float, times: list[float] = times) -> None:
            times.append(seconds)

        async with SimulatedGpu(latency=(1, 9), seed=seed, sleep=sleep) as gpu, calling() as caller:
            for n in range(20):
                await send(caller, gpu, f"j{n}")
        assert all(1 <= time <= 9 for time in times)
        seen.append(times)
    assert seen[0] == seen[1] != seen[2]


class TestProcess:
    """The program ``python -m taskqueue_dispatch.gpu_server``."""

    async def test_it_runs(self, caller: EndpointClient) -> None:
        """The program prints its URL, runs jobs, and ends after SIGTERM (fault H4)."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "taskqueue_dispatch.gpu_server", "--latency", "0.001", "0.002"),
            *("--name", "b", "--slots", "2"),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(30):
                told = json.loads(await process.stdout.readline())
            sent = await caller.send(lease_of(told["url"]), task_of(), SYNC, attempt=1)
            assert sent == Done(b'{"server":"b","job_id":"job-1","attempt":1}')
            process.terminate()
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    @pytest.mark.parametrize(
        "words",
        [
            ["--latency", "2", "1"], ["--latency", "-1"], ["--latency", "nan"], ["--latency", "1", "2", "3"],
            ["--slots", "0"], ["--port", "65536"], ["--port", "-1"], ["--mode", "odd"],
        ],
    )  # fmt: skip
    def test_words(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        """A wrong argument is reported before the server starts (fault H5)."""
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert words[0] in capsys.readouterr().err
