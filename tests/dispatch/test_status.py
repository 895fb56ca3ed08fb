"""Tests of the status of jobs, and of the dead letters of all models."""

from __future__ import annotations

import itertools

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dead_lettering_of, slots_of
from taskqueue_core.errors import InvalidInput
from taskqueue_core.retry import EXHAUSTED
from taskqueue_core.tasks import Task
from taskqueue_dispatch.jobs import Submission, task_of
from taskqueue_dispatch.names import CALLBACKS, mark_of, queue_of
from taskqueue_dispatch.status import Jobs, JobState, mark_of_queue
from tests.dispatch.desk import SPELLINGS, URL, registry_of, well

MODELS = ("flux", "zimg", "a-b-c", "meta/llama")


async def publish(backend: Backend, model: str, key: str, **fields: object) -> str:
    """Publish a job and return its id."""
    task = task_of(Submission(model=model, idempotency_key=key, **fields))  # type: ignore[arg-type] # those of a job
    await backend.publisher.publish(task)
    return task.id


async def bury(backend: Backend, model: str, *keys: str) -> list[str]:
    """Publish jobs, fail each of them for good, and return their ids, oldest first."""
    ids = []
    async with backend.subscribe([queue_of(model)], "dispatcher") as subscription:
        for key in keys:
            ids.append(await publish(backend, model, key))
            (delivery,) = (await subscription.receive(1, 5)).deliveries
            letters = dead_lettering_of(backend, subscription)
            await letters.dead_letter(delivery, EXHAUSTED, "out of memory")
    return ids


async def test_a_jobs_way(backend: Backend) -> None:
    """A job's status shows its state, server, progress and result, and only the job's id is needed (C26)."""
    registry = await registry_of(backend)
    await registry.register("flux", "flux-server-1", URL, 1)
    await well(backend, "flux", "flux-server-1")
    jobs, control, pool = Jobs(backend, registry), control_of(backend), slots_of(backend)
    job = await publish(backend, "flux", "k")
    status = await jobs.status(job)
    assert status is not None
    assert (status.model, status.state, status.attempt) == ("flux", JobState.QUEUED, 1)
    assert await jobs.result(job) is None
    async with backend.subscribe([queue_of("flux")], "dispatcher") as subscription:
        (delivery,) = (await subscription.receive(1, 5)).deliveries
        status = await jobs.status(job)
        assert status is not None
        assert (status.state, status.server) == (JobState.RUNNING, None)
        (lease,) = await pool.acquire("flux", "dispatcher", ttl=60)
        await pool.assign((lease, job), ttl=60)
        await control.progress(delivery, 0.5)
        status = await jobs.status(job)
        assert status is not None
        assert (status.server, status.progress) == ("flux-server-1", 0.5)
        await subscription.ack(delivery, results=[b'{"url":"x"}'])
    status = await jobs.status(job)
    assert status is not None
    assert (status.state, status.server, status.error) == (JobState.DONE, None, None)
    assert await jobs.result(job) == b'{"url":"x"}'
    assert not await jobs.cancel(job)


@pytest.mark.parametrize("model", SPELLINGS)
async def test_models_of_any_spelling(backend: Backend, model: str) -> None:
    """A job is found whatever its model's name is, even after the model's endpoints are removed (OPEN-C5, H7, C26)."""
    registry = await registry_of(backend)
    jobs = Jobs(backend, registry)
    await publish(backend, "another", "k")
    job = await publish(backend, model, "k")
    assert mark_of_queue(queue_of(model)) == mark_of(model)
    status = await jobs.status(job)
    assert status is not None
    assert status.model in {model, None}
    await registry.register(model, "a", URL, 1)
    status = await jobs.status(job)
    assert status is not None
    assert status.model == model
    await registry.remove(model, "a")
    assert await jobs.cancel(job)


@pytest.mark.parametrize("job", ["", "no such", "{x}", "a/b", "x" * 201])
async def test_ids_that_are_none(backend: Backend, job: str) -> None:
    """An invalid id is refused (OPEN-C5)."""
    jobs = Jobs(backend, await registry_of(backend))
    for call in (jobs.status, jobs.result, jobs.cancel, jobs.redrive, jobs.discard):
        with pytest.raises(InvalidInput):
            await call(job)


async def test_unknown_jobs(backend: Backend) -> None:
    """An unknown job has no status, and a task of another queue is not treated as a job (C26)."""
    jobs = Jobs(backend, await registry_of(backend))
    await publish(backend, "flux", "k")
    await backend.publisher.publish(Task(key="work", id="x"), Task(key=CALLBACKS, id="y-x"))
    for job in (f"{mark_of('flux')}-unknown", f"{mark_of('unheard')}-x", "x", "y-x", "_-x"):
        assert await jobs.status(job) is None
        assert await jobs.result(job) is None
        assert not await jobs.cancel(job)
        assert not await jobs.redrive(job)
        assert not await jobs.discard(job)


async def test_dead_letters_of_all_models(backend: Backend) -> None:
    """The dead letters of all models are listed in pages, each of them once (C17)."""
    jobs = Jobs(backend, await registry_of(backend))
    dead = {model: await bury(backend, model, *"abcde") for model in MODELS}
    await bury_elsewhere(backend)
    assert [letter.task.id for letter in await jobs.list("flux")] == dead["flux"]
    assert await jobs.list("unheard") == ()
    everything = [letter.task.id for letter in await jobs.list()]
    assert sorted(everything) == sorted(itertools.chain(*dead.values()))
    for limit in (1, 3, 5, 7, 20):
        paged: list[str] = []
        while page := await jobs.list(limit=limit, after=paged[-1] if paged else None):
            assert len(page) <= limit
            paged += [letter.task.id for letter in page]
        assert paged == everything
    for limit in (0, 1001):
        with pytest.raises(InvalidInput):
            await jobs.list(limit=limit)


async def bury_elsewhere(backend: Backend) -> None:
    """Create a dead letter in a queue that is not the dispatcher's."""
    await backend.publisher.publish(Task(key="work", id="task"))
    async with backend.subscribe(["work"], "worker") as subscription:
        (delivery,) = (await subscription.receive(1, 5)).deliveries
        await dead_lettering_of(backend, subscription).dead_letter(delivery, "no", None)
