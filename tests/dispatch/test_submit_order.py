"""Tests of submitting jobs with tenants, and of submitting while no endpoint is healthy."""

from __future__ import annotations

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Order, Seen, slots_of
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.models import ModelConfig, WhenDown
from taskqueue_dispatch.submit import Estimates, Leased, NoSlots, Queued, Reason, Submitter
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import URL, registry_of, well
from tests.dispatch.submitters import FLUX, KEY, counts, desk


async def test_tenants_are_refused_one_by_one(backend: Backend) -> None:
    """With fair order, a tenant that has used up its capacity is refused, and other tenants are not (B5, OPEN-B2)."""
    config = ModelConfig(queue_per_slot=2, order=Order.FAIR)
    submitter = await desk(backend, slots=1, config=config)

    async def submit(tenant: str) -> object:
        told = await submitter.submit(Submission(model="flux", tenant=tenant))
        return told.reason if isinstance(told, NoSlots) else type(told)

    assert [await submit("a") for _ in range(3)] == [Leased, Queued, Reason.TENANT_FULL]
    assert [await submit("b") for _ in range(3)] == [Queued, Queued, Reason.TENANT_FULL]


async def test_turns_by_weight_over_all_instances(backend: Backend) -> None:
    """Tenants take turns by weight, even if several processes publish and receive their jobs (B2, OPEN-B4)."""
    config = ModelConfig(order=Order.FAIR, weights={"gold": 3})
    submitters = [await desk(backend, slots=1, config=config) for _ in range(2)]
    for number in range(36):
        for tenant in ("gold", "plain"):
            job = Submission(model="flux", tenant=tenant)
            await submitters[number % 2].submit(job)
    instances = [backend.subscribe([KEY], f"instance-{number}") for number in range(2)]
    taken = []
    for number in range(40):
        (delivery,) = (await instances[number % 2].receive(1, 5)).deliveries
        taken.append(delivery.task.tenant)
    assert taken.count("gold") == pytest.approx(30, abs=1)
    for instance in instances:
        await instance.close()


@pytest.mark.parametrize("when_down", WhenDown)
async def test_no_healthy_endpoint(backend: Backend, when_down: WhenDown) -> None:
    """While no endpoint is healthy, queued jobs stay, and new ones are queued or refused (B11, OPEN-B3)."""
    submitter = await desk(backend, slots=1, config=ModelConfig(when_down=when_down))
    assert isinstance(await submitter.submit(FLUX), Leased)
    await slots_of(backend).reconcile("flux", "a", None, settled=0)
    told = await submitter.submit(FLUX)
    if when_down is WhenDown.QUEUE:
        assert isinstance(told, Queued)
        assert await counts(backend) == (2, 2)
    else:
        assert isinstance(told, NoSlots)
        assert told.reason is Reason.NO_HEALTHY_ENDPOINT
        assert await counts(backend) == (1, 1)
    await slots_of(backend).reconcile("flux", "a", Seen(active=0), settled=0)
    assert not isinstance(await submitter.submit(FLUX), NoSlots)


async def test_health_is_looked_at_fresh() -> None:
    """A submission reads the endpoints' health from the store, however old the process's own view is (B11)."""
    backend = MemoryBackend()
    submitter = await desk(backend, slots=0, config=ModelConfig(when_down=WhenDown.REFUSE))
    other = await registry_of(backend)
    await other.register("flux", "a", URL, 1)
    await well(backend, "flux", "a")
    assert isinstance(await submitter.submit(FLUX), Leased)
    await other.remove("flux", "a")
    told = await submitter.submit(FLUX)
    assert isinstance(told, NoSlots)
    assert told.reason is Reason.NO_ENDPOINTS


async def test_a_model_that_this_process_has_not_heard_of() -> None:
    """A model that another process has just registered is found (C12)."""
    backend = MemoryBackend()
    registry = await registry_of(backend)
    submitter = Submitter(backend, registry, Estimates())
    await desk(backend, slots=1, config=ModelConfig(queue_per_slot=1))
    assert registry.view("flux") is None
    assert isinstance(await submitter.submit(FLUX), Leased)
