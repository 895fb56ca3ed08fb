"""Tests of submitting a job, which is stored before one of three answers is given."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, slots_of
from taskqueue_core.errors import (
    BackendUnavailable,
    IdConflict,
    InvalidInput,
    PublishUnconfirmed,
    QueueFull,
)
from taskqueue_core.queue_settings import change_settings, pause_queue
from taskqueue_core.tasks import Settled
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.status import JobState
from taskqueue_dispatch.submit import Estimates, Leased, NoSlots, Queued, Reason, Submitter
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import URL, Failing, registry_of, well
from tests.dispatch.submitters import FLUX, KEY, counts, desk, hold, take
from tests.redis.backends import opened
from tests.redis.servers import RedisServer


async def test_three_answers(backend: Backend) -> None:
    """A job is leased while slots are free, then queued, and refused if there are no endpoints (B9, C6)."""
    submitter = await desk(backend)
    (spare,) = await slots_of(backend).acquire("flux", "a-runner", ttl=60)
    told = [await submitter.submit(FLUX) for _ in range(4)]
    assert [type(one) for one in told] == [Leased, Leased, Queued, Queued]
    assert [one.position for one in told if isinstance(one, Queued)] == [2, 3]
    await slots_of(backend).release(spare)
    none = await submitter.submit(Submission(model="sdxl"))
    assert isinstance(none, NoSlots)
    assert none.reason is Reason.NO_ENDPOINTS
    assert none.retry_after > 0
    assert await counts(backend) == (4, 4)


async def test_slots_in_use_are_not_promised(backend: Backend) -> None:
    """Slots in use, of a paused endpoint, or of a server full with another model are not free (B6, B9)."""
    submitter = await desk(backend)
    pool = slots_of(backend)
    leases = await hold(backend, 2)
    assert isinstance(await submitter.submit(FLUX), Queued)
    await pool.release(*leases)
    await take(backend)
    assert isinstance(await submitter.submit(FLUX), Leased)
    await take(backend)
    await pool.rest("flux", "a", 60)
    assert isinstance(await submitter.submit(FLUX), Queued)
    await pool.rest("flux", "a", 0)
    await take(backend)
    registry = submitter._registry
    await registry.register("flux", "a", URL, 2, together=2)
    await registry.register("sdxl", "a", URL, 2, together=2)
    await well(backend, "sdxl", "a")
    assert len(await pool.acquire("sdxl", "somebody", ttl=60, limit=2)) == 2
    assert isinstance(await submitter.submit(FLUX), Queued)


async def test_an_answer_of_the_store_that_was_lost() -> None:
    """If the store's response is lost, the same job is published again and stored once (C9, OPEN-C1)."""
    backend = MemoryBackend()
    submitter = await desk(backend)
    publish, lost = backend.publisher.publish, 2

    async def unconfirmed(*tasks: Any) -> Any:
        nonlocal lost
        told = await publish(*tasks)
        if lost:
            lost -= 1
            raise PublishUnconfirmed("lost")
        return told

    backend.publisher.publish = unconfirmed  # type: ignore[method-assign] # an answer is lost
    told = await submitter.submit(FLUX)
    assert not isinstance(told, NoSlots)
    assert await counts(backend) == (1, 1)
    lost = 1000
    with pytest.raises(PublishUnconfirmed) as caught:
        await submitter.submit(FLUX)
    assert caught.value.task_id is not None
    assert lost == 996
    assert await counts(backend) == (2, 2)


@pytest.mark.parametrize("part", ["_pool", "_control"])
async def test_a_store_out_of_reach(part: str) -> None:
    """While the store is unavailable a submission fails, and a repetition stores one copy (OPEN-C1, C26)."""
    backend = MemoryBackend()
    submitter = await desk(backend)
    one = Submission(model="flux", idempotency_key="k")
    await submitter.submit(one)
    failing = Failing(getattr(submitter, part))
    setattr(submitter, part, cast("Any", failing))
    failing.down = True
    with pytest.raises(BackendUnavailable):
        await submitter.submit(one)
    failing.down = False
    assert not isinstance(await submitter.submit(one), NoSlots)
    assert await counts(backend) == (1, 1)


async def test_the_same_job_again(backend: Backend) -> None:
    """A job that is submitted again is stored once, and the answer reflects its current state (OPEN-C1, C8, law 7)."""
    submitter = await desk(backend, slots=1)
    one = Submission(model="flux", payload=b'{"n":1}', idempotency_key="k")
    first = await submitter.submit(one)
    assert isinstance(first, Leased)
    again = await submitter.submit(one)
    assert isinstance(again, Queued)
    assert (again.job_id, again.position) == (first.job_id, 0)
    pool = slots_of(backend)
    async with backend.subscribe([KEY], "dispatcher") as subscription:
        (delivery,) = (await subscription.receive(1, 5)).deliveries
        (lease,) = await pool.acquire("flux", "dispatcher", ttl=60)
        await pool.assign((lease, delivery.task.id), ttl=60)
        assert await submitter.submit(one) == Leased(first.job_id, "a", JobState.RUNNING)
        assert await subscription.ack(delivery) == (Settled.OK,)
    assert await submitter.submit(one) == Leased(first.job_id, "a", JobState.DONE)
    other = Submission(model="flux", payload=b'{"n":2}', idempotency_key="k")
    with pytest.raises(IdConflict):
        await submitter.submit(other)
    assert (await counts(backend))[0] == 1


async def test_the_same_job_while_others_are_refused(backend: Backend) -> None:
    """A stored job that is submitted again is never refused, even while new jobs are (OPEN-C1, B13, C26)."""
    submitter = await desk(backend, slots=1, config=ModelConfig(queue_limit=1))
    one = Submission(model="flux", idempotency_key="k")
    first = await submitter.submit(one)
    assert isinstance(first, Leased)
    full = await submitter.submit(FLUX)
    assert isinstance(full, NoSlots)
    assert isinstance(await submitter.submit(one), Queued)
    await submitter._registry.remove("flux", "a")
    assert isinstance(await submitter.submit(FLUX), NoSlots)
    assert await submitter.submit(one) == Queued(first.job_id, 0, None)
    new = await submitter.submit(Submission(model="flux", idempotency_key="new"))
    assert isinstance(new, NoSlots)
    assert await counts(backend) == (1, 1)


async def test_a_burst_of_the_same_job(backend: Backend) -> None:
    """A job that is submitted many times at once, through several processes, is stored once (OPEN-C1, law 7)."""
    submitters = [await desk(backend, slots=3) for _ in range(3)]
    jobs = [Submission(model="flux", idempotency_key=f"k{number % 5}") for number in range(45)]
    told = await asyncio.gather(
        *(submitters[place % 3].submit(job) for place, job in enumerate(jobs))
    )
    assert len({one.job_id for one in told if not isinstance(one, NoSlots)}) == 5
    assert await counts(backend) == (5, 5)


async def test_back_pressure(backend: Backend) -> None:
    """A full queue refuses a job at once, with the reason and a retry time, and stores nothing (B4, B13, C26)."""
    submitter = await desk(backend, slots=1, config=ModelConfig(queue_per_slot=3))
    told = [await submitter.submit(FLUX) for _ in range(4)]
    assert [type(one) for one in told] == [Leased, Queued, Queued, NoSlots]
    assert isinstance(told[-1], NoSlots)
    assert told[-1].reason is Reason.QUEUE_FULL
    assert told[-1].retry_after >= 1
    assert await counts(backend) == (3, 3)


async def test_no_room_to_wait(backend: Backend) -> None:
    """If no job may wait, a job is leased or refused (B4, B13)."""
    submitter = await desk(backend, slots=1, config=ModelConfig(queue_per_slot=0))
    assert isinstance(await submitter.submit(FLUX), Leased)
    assert isinstance(await submitter.submit(FLUX), NoSlots)
    await take(backend)
    await hold(backend, 1)
    told = await submitter.submit(FLUX)
    assert isinstance(told, NoSlots)
    assert told.reason is Reason.QUEUE_FULL
    assert await counts(backend) == (1, 0)


async def test_an_intake_that_is_paused(backend: Backend) -> None:
    """A queue with paused intake refuses jobs with its own reason (B13)."""
    submitter = await desk(backend)
    await pause_queue(control_of(backend), KEY, intake=True, paused=True)
    told = await submitter.submit(FLUX)
    assert isinstance(told, NoSlots)
    assert told.reason is Reason.INTAKE_PAUSED


async def test_a_queue_that_is_closed_for_good(backend: Backend) -> None:
    """A queue that has moved raises `QueueFull`, because trying again would not help (B13)."""
    submitter = await desk(backend)

    def moved(found: Any) -> Any:
        return found.model_copy(update={"moved_to": "elsewhere"})

    await change_settings(control_of(backend), KEY, moved)
    with pytest.raises(QueueFull):
        await submitter.submit(FLUX)


async def test_a_job_for_later(backend: Backend) -> None:
    """A job with a start time is queued, and its estimated wait is at least the time until then (C6)."""
    submitter = await desk(backend)
    told = await submitter.submit(Submission(model="flux", not_before=backend.now() + 100))
    assert isinstance(told, Queued)
    assert told.estimated_wait == pytest.approx(100, abs=20)


async def test_callbacks_are_checked_at_submit() -> None:
    """A forbidden callback URL is refused before the job is stored (C7, OPEN-C7)."""
    backend, checked = MemoryBackend(), []
    submitter = await desk(backend)
    job = Submission(model="flux", callback_url="https://client.example/hook")
    with pytest.raises(InvalidInput, match="callback_url"):
        await submitter.submit(job)

    async def check(url: str) -> None:
        checked.append(url)
        if "evil" in url:
            raise InvalidInput("callback_url", "an address inside", "one outside")

    submitter._check_callback = check
    assert isinstance(await submitter.submit(job), Leased)
    with pytest.raises(InvalidInput, match="an address inside"):
        await submitter.submit(Submission(model="flux", callback_url="https://evil.example/"))
    assert len(checked) == 2
    assert await counts(backend) == (1, 1)


async def test_the_queue_outlives_all_processes(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """Jobs, slots and configurations are still there after all processes have ended (OPEN-B1, C9, C13)."""
    async with opened(redis_server.url, redis_prefix) as backend:
        submitter = await desk(backend, config=ModelConfig(max_retries=4))
        for number in range(10):
            await submitter.submit(Submission(model="flux", payload=str(number).encode()))
    async with opened(redis_server.url, redis_prefix) as backend:
        registry = await registry_of(backend)
        view = registry.view("flux")
        assert view is not None
        assert (view.slots, view.config.max_retries) == (2, 4)
        told = await Submitter(backend, registry, Estimates()).submit(FLUX)
        assert isinstance(told, Queued)
        assert told.position == 10
        assert [int((await take(backend)).task.payload) for _ in range(10)] == list(range(10))


def test_estimates() -> None:
    """The estimate of a wait is based on recent durations per model, and the memory it uses is bounded (B9)."""
    estimates = Estimates()
    assert estimates.wait("flux", 0, 1) is None
    estimates.note("flux", 10)
    assert estimates.wait("flux", 0, 1) == 10
    assert estimates.wait("flux", 3, 2) == 20
    assert estimates.wait("flux", 3, 0) is None
    estimates.note("flux", 20)
    assert estimates.wait("flux", 0, 1) == pytest.approx(11)
    for number in range(10_000):
        estimates.note(f"model {number}", 1)
    assert estimates.wait("flux", 0, 1) is None
    assert estimates.wait("model 0", 0, 1) == 1
