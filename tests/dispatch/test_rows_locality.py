"""Tests of servers with several models: a job prefers a server that has its model loaded, and models take turns."""

from __future__ import annotations

import asyncio
from collections import Counter

from msgspec import structs

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Endpoint, Seen, SlotLease, SlotPool, slots_of
from taskqueue_dispatch.gpu_server.jobs import GpuJob
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu
from taskqueue_dispatch.service import Dispatcher
from taskqueue_dispatch.shared_capacity import CapacityTurns
from tests.dispatch.desk import URL, registry_of, settings
from tests.dispatch.patience import until
from tests.dispatch.support import Gate, dispatching, ended, send


async def share(dispatcher: Dispatcher, *gpus: SimulatedGpu) -> None:
    """Register two models on each server, which runs one job at a time, and wait until all endpoints are usable."""
    for gpu in gpus:
        for model in ("flux", "sd"):
            await dispatcher.registry.register(model, gpu.name, gpu.url, 1, together=1)

    async def all_well() -> bool:
        return all(info.usable for info in (await dispatcher.pool.inspect()).endpoints)

    await until(all_well, "every server is healthy")


async def test_a_switch_is_reported_to_the_server(backend: Backend) -> None:
    """A job tells the server if the previous job was for another model, which may need loading (A19)."""
    switches: list[bool] = []

    async def note(job: GpuJob) -> None:
        switches.append(job.switched)

    async with (
        SimulatedGpu(name="one", handler=note) as gpu,
        dispatching(backend) as dispatcher,
    ):
        await share(dispatcher, gpu)
        for model in ("flux", "flux", "sd", "sd", "flux"):
            await ended(dispatcher, await send(dispatcher, model))
        assert switches == [False, False, True, False, True]
        view = await dispatcher.pool.inspect()
        assert {info.last_model for info in view.endpoints} == {"flux"}
        assert gpu.refused == 0


async def test_jobs_go_where_their_model_is_loaded(backend: Backend) -> None:
    """If two servers have the same models, each job goes to the server that ran its model last (A18, A19)."""
    switches: list[bool] = []

    async def note(job: GpuJob) -> None:
        switches.append(job.switched)

    async with (
        SimulatedGpu(name="one", handler=note) as one,
        SimulatedGpu(name="two", handler=note) as two,
    ):
        loaded = {"flux": two, "sd": one}
        for model, gpus in (("flux", (one, two)), ("sd", (two, one))):
            await _load(slots_of(backend), model, *gpus)
        # With these long times no lease expires and no check is late on a busy machine; otherwise a job might go to the
        # other server.
        async with dispatching(backend, health_interval=60.0, lease=60.0) as dispatcher:
            jobs: dict[str, list[str]] = {"flux": [], "sd": []}
            for _ in range(2):
                for model, ids in jobs.items():
                    ids.extend(await send(dispatcher, model))
                    await ended(dispatcher, ids)
                    await until(lambda: _idle(dispatcher), "no slot is in use")
        for model, gpu in loaded.items():
            assert list(gpu.runs) == jobs[model]
    assert switches == [False] * 4


async def _idle(dispatcher: Dispatcher) -> bool:
    """Return whether each model holds one slot in reserve, and no slot has a job."""
    leases = (await dispatcher.pool.inspect()).leases
    return Counter((lease.model, lease.job) for lease in leases) == {
        ("flux", None): 1,
        ("sd", None): 1,
    }


async def _load(pool: SlotPool, model: str, *gpus: SimulatedGpu) -> None:
    """Register servers for a model; the last server has loaded the model last."""
    for gpu in gpus:
        await pool.register(Endpoint(model=model, server=gpu.name, url=gpu.url, slots=1))
        await pool.reconcile(model, gpu.name, Seen(active=0), settled=0)
    leases = await pool.acquire(model, "loader", ttl=60, limit=len(gpus))
    (last,) = (lease for lease in leases if lease.server == gpus[-1].name)
    await pool.assign((last, "warm-up"), ttl=60)
    await pool.release(*leases)


async def test_a_backlog_keeps_no_server(backend: Backend) -> None:
    """A model with a large backlog does not keep another model on the same server from running (A18, C1, C26)."""
    gate = Gate()

    async def work(job: GpuJob) -> None:
        await gate(job)
        await asyncio.sleep(0.02)

    async with (
        SimulatedGpu(name="one", handler=work) as gpu,
        dispatching(backend, turn=0.2) as dispatcher,
    ):
        await share(dispatcher, gpu)
        many = await send(dispatcher, "flux", 30)
        await until(lambda: gpu.active == 1)
        few = await send(dispatcher, "sd", 2)
        gate.open()
        await ended(dispatcher, [*few, *many])
        assert list(gpu.runs)[-1] in many
        assert gpu.refused == 0
        assert gpu.most_at_once == 1


async def test_turns(backend: Backend) -> None:
    """Only a server that cannot serve all its models at once has turns; an offer ends a turn (A18)."""
    registry, pool = await registry_of(backend), slots_of(backend)
    now = [100.0]
    turns = CapacityTurns(registry, settings(turn=10), monotonic=lambda: now[0])

    async def lease(server: str, slots: int = 1, together: int | None = None) -> SlotLease:
        for model in ("flux", "sd") if server != "alone" else ("flux",):
            await pool.register(
                Endpoint(
                    model=model,
                    server=server,
                    url=URL,
                    slots=slots,
                    together=together,
                    reports=False,
                )
            )
        await registry.refresh()
        found = await pool.acquire("flux", "me", ttl=60, limit=9)
        turns.take(*found)
        return next(one for one in found if one.server == server)

    shared = await lease("shared", together=1)
    unlimited = await lease("unlimited")
    roomy = await lease("roomy", together=2)
    alone = await lease("alone", together=1)
    assert [turns.is_shared(one) for one in (shared, unlimited, roomy, alone)] == [
        True, False, False, False,
    ]  # fmt: skip
    assert not turns.is_over(shared)
    now[0] += 10
    assert turns.is_over(shared)
    assert not any(turns.is_over(one) for one in (unlimited, roomy, alone))
    before, ahead, after = turns.others_first, turns.offer(shared), turns.others_first
    assert (before, after) == (False, True)
    assert not turns.is_over(shared)
    now[0] += ahead
    assert not turns.others_first
    assert turns.offer(structs.replace(shared, switched=True)) > ahead
    turns.take(shared)
    assert not turns.is_over(shared)
    await pool.drain("sd", "shared")
    await registry.refresh()
    now[0] += 10
    assert not turns.is_over(shared)
