"""Dispatchers with short timeouts, and helpers that submit jobs and wait for their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import PoolView, control_of, slots_of
from taskqueue_core.json_text import encode_json
from taskqueue_core.tasks import Ledger
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.gpu_server.jobs import GpuJob
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.status import JobState
from taskqueue_dispatch.submit import NoSlots
from tests.dispatch.patience import PATIENCE, until

FAST: dict[str, Any] = {
    "lease": 2.0,
    "safety_pass": 0.2,
    "health_interval": 0.1,
    "settled": 0.3,
    "busy_rest": 0.02,
    "breaker_rest": 0.05,
    "partition": 1.0,
    "drain": 0.0,
}
ASKED = "/status/{id}"
"""path at which a simulated GPU server returns a job's status"""


def settings(**values: Any) -> DispatchSettings:
    """Return dispatcher settings with short timeouts."""
    return DispatchSettings(_env_file=None, **(FAST | values))


@asynccontextmanager
async def dispatching(backend: Backend, **values: Any) -> AsyncIterator[Dispatcher]:
    """Run a dispatcher, and yield it."""
    async with Dispatcher(backend, settings(**values)) as dispatcher:
        yield dispatcher


class Gate:
    """A model handler whose jobs run until `open` is called."""

    def __init__(self) -> None:
        """Create the gate, closed."""
        self.opened = asyncio.Event()

    async def __call__(self, _: GpuJob) -> None:
        """Run a job until the gate is open."""
        await self.opened.wait()

    def open(self) -> None:
        """Let all jobs finish, including those that start later."""
        self.opened.set()


async def serve(
    dispatcher: Dispatcher, model: str, *gpus: SimulatedGpu, config: ModelConfig | None = None
) -> None:
    """Register simulated servers for a model, and wait until all of them are usable."""
    names = {gpu.name for gpu in gpus}
    if config is not None:
        await dispatcher.registry.configure(model, config)
    for gpu in gpus:
        await dispatcher.registry.register(model, gpu.name, gpu.url, gpu.slots)

    async def all_well() -> bool:
        view: PoolView = await slots_of(dispatcher.backend).inspect(model)
        usable = {info.endpoint.server for info in view.endpoints if info.usable}
        return names <= usable

    await until(all_well, "every server is healthy")


async def send(dispatcher: Dispatcher, model: str, number: int = 1, **fields: Any) -> list[str]:
    """Submit jobs, each of which must be accepted, and return their ids."""
    ids = []
    for count in range(number):
        payload = encode_json("payload", {"n": count})
        told = await dispatcher.submit(Submission(model=model, payload=payload, **fields))
        assert not isinstance(told, NoSlots), told
        ids.append(told.job_id)
    return ids


async def ended(
    dispatcher: Dispatcher,
    ids: Sequence[str],
    state: JobState = JobState.DONE,
    within: float = PATIENCE,
) -> None:
    """Wait until every job is in the given state."""

    async def all_ended() -> bool:
        for job_id in reversed(ids):
            status = await dispatcher.jobs.status(job_id)
            if status is None or status.state is not state:
                return False
        return True

    await until(all_ended, f"{len(ids)} jobs are {state}", within=within)


async def all_free(backend: Backend) -> bool:
    """Return whether no slot is in use by a job."""
    view = await slots_of(backend).inspect()
    return all(info.assigned + info.detached == 0 for info in view.endpoints)


async def ledger_of(backend: Backend, model: str) -> Ledger:
    """Return the ledger of a model's queue."""
    return await control_of(backend).ledger(queue_of(model))
