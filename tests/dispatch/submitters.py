"""A job submitter for tests, and helpers that inspect the jobs it has stored."""

from __future__ import annotations

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import SlotLease, control_of, slots_of
from taskqueue_core.tasks import Delivery
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.submit import Estimates, Submitter
from tests.dispatch.desk import URL, registry_of, well

FLUX = Submission(model="flux", payload=b'{"prompt":"a sunset"}')
KEY = queue_of("flux")


async def desk(
    backend: Backend, slots: int = 2, config: ModelConfig | None = None, model: str = "flux"
) -> Submitter:
    """Return a submitter for a model that has one healthy endpoint with ``slots`` slots, or none if 0."""
    registry = await registry_of(backend)
    if config is not None:
        await registry.configure(model, config)
    if slots:
        await registry.register(model, "a", URL, slots)
        await well(backend, model, "a")
    await registry.refresh()
    return Submitter(backend, registry, Estimates())


async def take(backend: Backend) -> Delivery:
    """Receive the next job of the model, and ack it."""
    async with backend.subscribe([KEY], "dispatcher") as subscription:
        received = await subscription.receive(1, 5)
        (delivery,) = received.deliveries
        await subscription.ack(delivery, results=[b"1"])
    return delivery


async def counts(backend: Backend) -> tuple[int, int]:
    """Return how many jobs were published, and how many are waiting."""
    ledger = await control_of(backend).ledger(KEY)
    assert ledger.balanced
    return ledger.published, ledger.waiting


async def hold(backend: Backend, number: int) -> tuple[SlotLease, ...]:
    """Acquire slots, and assign a job to each."""
    pool = slots_of(backend)
    leases = await pool.acquire("flux", "somebody", ttl=60, limit=number)
    assert len(leases) == number
    pairs = [(lease, f"other-{place}") for place, lease in enumerate(leases)]
    told = await pool.assign(*pairs, ttl=60)
    return tuple(lease for lease in told if lease is not None)
