"""Tests that a slot is not used again while its server still runs the job, and that no job runs twice at once."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import EndpointInfo, Seen, SlotLease
from taskqueue_core.consumer import maintenance
from taskqueue_core.tasks import Delivery
from taskqueue_dispatch import job_attempt, models
from taskqueue_dispatch.endpoint_client.answers import (
    Answer,
    Busy,
    Done,
    EndpointUnreachable,
    JobRunningAnswer,
    Missing,
)
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.job_notes import sent_note
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.models import ModelConfig, ModelType
from taskqueue_dispatch.remote_job import RemoteJob
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.status import JobState
from tests.dispatch.gpu_support import endpoint_of, lease_of, task_of
from tests.dispatch.patience import until
from tests.dispatch.support import ASKED, Gate, all_free, dispatching, ended, send, settings

SHORT = ModelConfig(max_poll_time=0.2, poll_interval=0.05, max_retries=5)
TOLD = SHORT.model_copy(update={"poll_endpoint_template": ASKED})
POLLED = TOLD.model_copy(update={"model_type": ModelType.ASYNC})
ASYNC = {ModelType.ASYNC: True, ModelType.SYNC: False}


async def register(dispatcher: Dispatcher, gpu: SimulatedGpu, slots: int) -> list[int]:
    """Register a server with fewer slots than it has; return a list to which each health check adds an item."""
    checks: list[int] = []
    health = dispatcher.caller.health

    async def counted(*words: Any) -> Any:
        checks.append(1)
        return await health(*words)

    dispatcher.caller.health = counted  # type: ignore[method-assign,assignment]
    await dispatcher.registry.register("flux", gpu.name, gpu.url, slots)
    return checks


@pytest.mark.parametrize("config", [SHORT, TOLD, POLLED], ids=["sync", "sync-asked", "async"])
async def test_jobs_over_their_time(
    backend: Backend, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job over its time keeps its slot while its server runs it, and is not sent again (U26, C18, fault H1).

    The server cannot cancel it. Its result is taken when it comes.
    """

    async def ignored(*_: object) -> None:
        pass

    gate = Gate()
    async with (
        SimulatedGpu(slots=8, handler=gate, asynchronous=ASYNC[config.model_type]) as gpu,
        dispatching(backend) as dispatcher,
    ):
        monkeypatch.setattr(dispatcher.caller, "cancel", ignored, raising=False)
        await dispatcher.registry.configure("flux", config)
        checks = await register(dispatcher, gpu, 2)
        ids = await send(dispatcher, "flux", 4)
        await until(lambda: gpu.active == 2)
        begun = len(checks)
        await until(lambda: len(checks) >= begun + 30, "the time of both jobs is over")
        assert (gpu.most_at_once, gpu.posts) == (2, 2)
        gate.open()
        await ended(dispatcher, ids)
        assert gpu.most_at_once == 2
        assert set(gpu.runs.values()) == {1}
        await until(lambda: all_free(backend), "all slots are free")


async def test_a_job_that_is_cancelled(backend: Backend) -> None:
    """A job over its time that its server cancels is tried again, one run after the other (U26, C18, fault H1)."""
    config = TOLD.model_copy(update={"max_retries": 1})
    async with (
        SimulatedGpu(slots=8, latency=300) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await dispatcher.registry.configure("flux", config)
        await register(dispatcher, gpu, 1)
        ids = await send(dispatcher, "flux")
        await ended(dispatcher, ids, JobState.FAILED)
        assert (gpu.most_at_once, gpu.runs[ids[0]], gpu.active) == (1, 2, 0)
        status = await dispatcher.jobs.status(ids[0])
        assert status is not None
        assert status.error == "Exceeded max processing time"
        assert dispatcher.breaker.allows("flux", gpu.name)


async def test_a_connection_that_breaks(backend: Backend) -> None:
    """If the connection of a job breaks, its slot is kept until the server reports the job's end (U26, fault H1)."""
    gate = Gate()
    async with (
        SimulatedGpu(slots=8, handler=gate) as gpu,
        dispatching(backend) as dispatcher,
    ):
        checks = await register(dispatcher, gpu, 1)
        ids = await send(dispatcher, "flux", 2)
        await until(lambda: gpu.active == 1)
        assert gpu._program is not None
        for connection in list(gpu._program.server_state.connections):
            assert connection.transport is not None
            connection.transport.abort()
        begun = len(checks)
        await until(lambda: len(checks) >= begun + 10, "the server has reported the job")
        assert (gpu.most_at_once, gpu.posts) == (1, 1)
        gate.open()
        await ended(dispatcher, ids)
        assert set(gpu.runs.values()) == {1}


@pytest.mark.parametrize("config", [TOLD, POLLED], ids=["sync", "async"])
async def test_a_restart_of_the_only_dispatcher(backend: Backend, config: ModelConfig) -> None:
    """After a graceful restart, jobs that ended without a dispatcher are not sent again (U26, FIX-C8, fault H2)."""
    gate = Gate()
    config = config.model_copy(update={"max_poll_time": 60})
    asynchronous = ASYNC[config.model_type]
    async with SimulatedGpu(slots=8, handler=gate, asynchronous=asynchronous) as gpu:
        async with dispatching(backend) as first:
            await first.registry.configure("flux", config)
            await register(first, gpu, 2)
            ids = await send(first, "flux", 6)
            await until(lambda: gpu.active == 2)
        gate.open()
        await until(lambda: gpu.active == 0)
        async with dispatching(backend) as second:
            await ended(second, ids)
            assert gpu.posts == len(ids), "a job was sent again"
            for job in ids:
                status = await second.jobs.status(job)
                assert status is not None
                assert status.losses == 0, "a restart costs no loss"


async def test_a_job_that_cannot_be_asked_for(backend: Backend) -> None:
    """A job without a status page is not sent again while its server reports it (U26, FIX-C8, fault H2)."""
    gate = Gate()
    async with SimulatedGpu(slots=8, handler=gate) as gpu:
        async with dispatching(backend) as first:
            await register(first, gpu, 2)
            ids = await send(first, "flux")
            await until(lambda: gpu.active == 1)
        async with dispatching(backend) as second:
            checks = await register(second, gpu, 2)
            await until(lambda: second.running.get("flux") == 1, "the job was taken over")
            await until(lambda: len(checks) >= 20, "the server has reported the job")
            assert gpu.posts == 1
            gate.open()
            await ended(second, ids)
        assert (set(gpu.runs.values()), gpu.most_at_once) == ({1}, 1)


async def test_a_delivery_of_a_job_over_its_time(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delivery of a job over its time is not lost while its server runs it (U26, law 6)."""
    monkeypatch.setattr(job_attempt, "_KEEP_SECONDS", 0.1)
    monkeypatch.setattr(models, "_MARGIN", 0.5)
    monkeypatch.setattr(maintenance, "_EVERY", 0.1)
    gate = Gate()
    async with (
        SimulatedGpu(slots=8, handler=gate) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await dispatcher.registry.configure("flux", SHORT)
        checks = await register(dispatcher, gpu, 1)
        ids = await send(dispatcher, "flux")
        await until(lambda: gpu.active == 1)
        await until(lambda: len(checks) >= 30, "a delivery without progress would be lost")
        gate.open()
        await ended(dispatcher, ids)
        status = await dispatcher.jobs.status(ids[0])
        assert status is not None
        assert (status.losses, status.attempt, gpu.posts) == (0, 1, 1)


class Asked:
    """A client that gives prepared answers to polls, by URL and id."""

    def __init__(self, answers: dict[tuple[str, str], list[Answer]]) -> None:
        """Create the client. The last answer of each list is repeated."""
        self.answers = answers
        self.polls = 0

    async def ask(self, url: str, job_id: str, _: ModelConfig) -> Answer:
        """Return the next answer; an unknown id is missing."""
        self.polls += 1
        answers = self.answers.get((url, job_id), [Missing()])
        return answers.pop(0) if len(answers) > 1 else answers[0]


A, B = "http://a:1/generate", "http://b:1/generate"


def remote(
    caller: Asked, *, late: tuple[bytes, ...] = (), resumed: bool = False, losses: int = 0
) -> RemoteJob:
    """Return a job that may have been sent before, with a slot on server A. Server B is healthy."""

    async def late_notes(*_: str) -> tuple[bytes, ...]:
        return late

    infos = [EndpointInfo(endpoint=endpoint_of(url), healthy=True) for url in (A, B)]
    context = SimpleNamespace(
        caller=caller,
        registry=SimpleNamespace(view=lambda _: SimpleNamespace(endpoints=infos)),
        settings=settings(),
        pool=SimpleNamespace(late=late_notes),
        events=None,
    )
    held = RenewedLease(lease_of(A))
    held.assigned_at = math.inf
    object.__setattr__(
        held,
        "lease",
        SimpleNamespace(model="flux", server="one", url=A, note=None, resumed=resumed),
    )
    return RemoteJob(delivery(losses=losses), held, POLLED, cast("Any", context))


def delivery(losses: int = 0) -> Delivery:
    """Return a delivery of a job."""
    return Delivery(task=task_of(), receipt="r", attempt=1, delivered_at=0.0, losses=losses)


@pytest.mark.parametrize(
    "unusable", [Busy(), EndpointUnreachable("garbage", sent=True)], ids=["busy", "garbage"]
)
async def test_an_answer_of_no_use(unusable: Answer) -> None:
    """After a loss, a healthy server is asked for the job until its answer is of use (U26, FIX-C8, fault H2)."""
    caller = Asked({(B, "job-1"): [unusable, unusable, JobRunningAnswer()]})
    assert await remote(caller, losses=1).find() == JobRunningAnswer()
    assert caller.polls == 4, "server A has said once that it does not know the job"


async def test_asked_where_it_was_sent() -> None:
    """The server in a late note is asked first, with its own id of the job (U26, FIX-C8, fault H2)."""
    caller = Asked({(B, "r-7"): [Done(b"1")], (B, "job-1"): [JobRunningAnswer()]})
    late = (sent_note(delivery(), "r-7", B),)
    assert await remote(caller, late=late, resumed=True).find() == Done(b"1")
    assert caller.polls == 1
    foreign = (sent_note(delivery(), "r-7", "http://elsewhere:1/generate"),)
    caller = Asked({("http://elsewhere:1/generate", "r-7"): [Done(b"2")]})
    assert await remote(caller, late=foreign, resumed=True).find() is None


async def test_never_sent() -> None:
    """A job that no earlier attempt can have sent is not asked for (FIX-C8)."""
    caller = Asked({})
    assert await remote(caller).find() is None
    assert caller.polls == 0


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, list[RemoteJob]]:
    """Hold jobs up before they are sent, until the gate is open. Return the gate and a list of these jobs."""
    gate, find = Gate(), RemoteJob.find
    jobs: list[RemoteJob] = []

    async def late_find(job: RemoteJob) -> Answer | None:
        jobs.append(job)
        await gate.opened.wait()
        job._held.assigned_at = -math.inf
        return await find(job)

    monkeypatch.setattr(RemoteJob, "find", late_find)
    return gate, jobs


IDLE = Seen(active=0, jobs=frozenset())


async def test_a_slot_that_ends_before_the_job_is_sent(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose slot another dispatcher has ended before the job was sent is not sent on that slot (U26, fault H4).

    The dispatcher was held up, for example while it asked other servers for the job or opened a connection.
    """
    gate, jobs = held_up(monkeypatch)
    async with (
        SimulatedGpu(slots=8, handler=Gate()) as gpu,
        dispatching(backend, health_interval=600, lease=60) as dispatcher,
    ):
        pool = dispatcher.pool
        await register(dispatcher, gpu, 1)
        ids = await send(dispatcher, "flux")
        await until(lambda: bool(jobs))
        others: list[SlotLease] = []

        async def taken() -> bool:
            await pool.reconcile("flux", gpu.name, IDLE, settled=0.1)
            others.extend(await pool.acquire("flux", "another", ttl=60))
            return bool(others)

        await until(taken, "the slot has ended and was given to another dispatcher")
        gate.open()
        await until(lambda: gpu.posts > 0 or dispatcher.running["flux"] == 0)
        assert gpu.posts == 0
        await pool.release(*others)
        await until(lambda: gpu.active == 1)
        status = await dispatcher.jobs.status(ids[0])
        assert status is not None
        assert (status.losses, status.attempt, gpu.posts) == (0, 1, 1)


async def test_a_report_from_before_the_job_was_sent(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report from before a late job was sent does not end its slot (U26, fault H4)."""
    gate, jobs = held_up(monkeypatch)
    async with (
        SimulatedGpu(slots=8, handler=Gate()) as gpu,
        dispatching(backend, health_interval=600, lease=60) as dispatcher,
    ):
        pool = dispatcher.pool
        await register(dispatcher, gpu, 1)
        await send(dispatcher, "flux")
        await until(lambda: bool(jobs))
        assert await pool.reconcile("flux", gpu.name, IDLE, settled=600) == ()
        gate.open()
        await until(lambda: gpu.active == 1)
        assert await pool.reconcile("flux", gpu.name, IDLE, settled=0.000_001) == ()


async def test_time_before_a_job_is_sent(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's time limit begins when it is sent, so a dispatcher that was frozen costs no attempt (U26, fault H1)."""
    gate, jobs = held_up(monkeypatch)
    async with SimulatedGpu() as gpu, dispatching(backend) as dispatcher:
        await dispatcher.registry.configure("flux", TOLD)
        await register(dispatcher, gpu, 1)
        ids = await send(dispatcher, "flux")
        await until(lambda: bool(jobs))
        await asyncio.sleep(2 * TOLD.max_poll_time)
        gate.open()
        await ended(dispatcher, ids)
        status = await dispatcher.jobs.status(ids[0])
        assert status is not None
        assert (status.attempt, gpu.posts) == (1, 1)


async def test_a_page_without_a_useful_answer(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose server gives no useful answers keeps its slot while it is asked for, and is sent in the end.

    Otherwise reports without the job would end the slot, and the job would begin to be asked for again, for ever (U26,
    law 1, fault H1).
    """
    find = RemoteJob.find

    async def find_after_a_loss(job: RemoteJob) -> Answer | None:
        job._delivery = structs.replace(job._delivery, losses=1)
        return await find(job)

    async def unusable(*_: object) -> Answer:
        return EndpointUnreachable("the response is about another job", sent=True)

    monkeypatch.setattr(RemoteJob, "find", find_after_a_loss)
    async with SimulatedGpu() as gpu, dispatching(backend) as dispatcher:
        monkeypatch.setattr(dispatcher.caller, "ask", unusable)
        await dispatcher.registry.configure("flux", TOLD)
        await register(dispatcher, gpu, 1)

        async def healthy() -> bool:
            return all(info.healthy for info in (await dispatcher.registry.models())[0].endpoints)

        await until(healthy, "the dispatcher knows that the server is healthy")
        ids = await send(dispatcher, "flux")
        await ended(dispatcher, ids)
        assert gpu.posts == 1
