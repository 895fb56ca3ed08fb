"""Tests of the slot finder, which returns a permit, a place in the waiting line, or a refusal."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Permit as Kind
from taskqueue_core.capabilities import SlotLease, slots_of
from taskqueue_core.errors import BackendUnavailable, InvalidInput, LeaseLost
from taskqueue_dispatch import slot_finder as finding
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.slot_finder import FoundNone, FoundQueued
from taskqueue_dispatch.submit import Reason
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import URL, free, registry_of, well
from tests.dispatch.finders import Desk, awaited, desk_of, is_free
from tests.dispatch.patience import PATIENCE, until


async def test_three_outcomes(backend: Backend) -> None:
    """A free slot is leased at once; otherwise the caller gets a place in the line or a refusal (B1, B9, B13)."""
    desk = await desk_of(backend, config=ModelConfig(queue_per_slot=1))
    async with await desk.permit() as permit:
        assert (permit.url, permit.server, permit.model) == (URL, "a", "flux")
        place = await desk.place()
        assert place.position == 0
        full = await desk.find()
        assert isinstance(full, FoundNone)
        assert full.reason is Reason.QUEUE_FULL
        none = await desk.find("sdxl")
        assert isinstance(none, FoundNone)
        assert none.reason is Reason.NO_ENDPOINTS
        assert none.retry_after > 0
    waiting = asyncio.ensure_future(awaited(place))
    assert await desk.serve() == 1
    await (await waiting).release()
    assert await free(desk.pool, "flux") == 1


async def test_permits_are_bound_to_requests(backend: Backend) -> None:
    """A permit belongs to its request: only the same request id takes over its slot (B6, B8)."""
    desk = await desk_of(backend, slots=2)
    first = await desk.permit(request_id="r1")
    (lease,) = (await desk.pool.inspect("flux")).leases
    assert (lease.job, lease.state) == ("find:r1", Kind.ASSIGNED)
    assert first.headers["X-Job-Id"] == "find:r1"
    second = await desk.permit(request_id="r1")
    assert await free(desk.pool, "flux") == 1
    assert await desk.renewer.renew()
    assert (first.lost.is_set(), second.lost.is_set()) == (True, False)
    third = await desk.permit(request_id="r2")
    assert await free(desk.pool, "flux") == 0
    for permit in (first, second, third):
        await permit.release()
    assert await free(desk.pool, "flux") == 2


async def test_a_job_is_not_taken_over(backend: Backend) -> None:
    """A request id that equals a job's id does not take over that job's slot (B6, OPEN-C4)."""
    desk = await desk_of(backend, slots=2)
    (lease,) = await desk.pool.acquire("flux", "dispatcher", ttl=60)
    (job,) = await desk.pool.assign((lease, "job"), ttl=60)
    assert job is not None
    await desk.permit(request_id="job")
    assert (await desk.pool.renew(job, ttl=60))[0] is not None


async def test_permits_come_back(backend: Backend) -> None:
    """A permit is released once: at the end of ``with``, by `release`, or when garbage-collected (B7)."""
    desk = await desk_of(backend)
    async with await desk.permit() as permit:
        await permit.release()
        await permit.release()
        again = await desk.permit()
    assert await free(desk.pool, "flux") == 0, "the slot has another holder"
    del again
    gc.collect()
    await until(lambda: is_free(desk, 1))
    with pytest.raises(ValueError, match="within"):
        async with await desk.permit():
            raise ValueError("within")
    assert await free(desk.pool, "flux") == 1
    assert not desk.renewer._held


async def test_detached_permits(backend: Backend) -> None:
    """A detached permit stays valid without its object, and any process can release its lease (B8)."""
    desk = await desk_of(backend)
    permit = await desk.permit(request_id="r")
    lease = await permit.detach(3600)
    assert lease.state is Kind.DETACHED
    await permit.release()
    del permit
    gc.collect()
    await asyncio.sleep(0)
    assert await free(desk.pool, "flux") == 0
    assert not desk.renewer._held
    assert await slots_of(backend).release(lease) == (True,)
    stale = await desk.permit()
    await desk.pool.release(stale._held.lease)
    with pytest.raises(LeaseLost):
        await stale.detach(60)


@pytest.mark.parametrize("call", ["acquire", "assign"])
async def test_cancelled_while_a_slot_is_taken(backend: Backend, call: str) -> None:
    """A request that is cancelled between any two steps holds no slot afterwards (B3, B7)."""
    desk = await desk_of(backend)
    # the backend itself frees a slot that it has acquired for a cancelled call
    if call == "acquire":
        desk.failing.put("acquire", _unseen(desk))
    desk.failing.held = {call}
    finding = asyncio.create_task(desk.find())
    await until(lambda: desk.failing.calls[call] == 1)
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding
    desk.failing.held.clear()
    await until(lambda: is_free(desk, 1))
    assert not desk.renewer._held


def _unseen(desk: Desk) -> Any:
    async def acquire(*_: Any, **__: Any) -> tuple[SlotLease, ...]:
        desk.failing.calls["acquire"] += 1
        await asyncio.Event().wait()
        return ()

    return acquire


async def test_a_store_out_of_reach(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request fails while the store is unavailable; a release continues in the background until it succeeds (C26)."""
    monkeypatch.setattr(finding, "_RELEASE_SECONDS", 0.1)
    desk = await desk_of(backend, lease=600)
    permit = await desk.permit()
    desk.failing.down = True
    async with asyncio.timeout(PATIENCE):
        await permit.release()
    with pytest.raises(BackendUnavailable):
        await desk.find()
    assert await free(desk.pool, "flux") == 0
    desk.failing.down = False
    await until(lambda: is_free(desk, 1))
    await until(lambda: not desk.finder._releases)


async def test_a_release_that_is_given_up() -> None:
    """A slot whose release does not succeed in time is left to expire (B7, C20)."""
    desk = await desk_of(MemoryBackend(), lease=0.2)
    permit = await desk.permit()
    desk.failing.down = True
    await permit.release()
    await until(lambda: not desk.finder._releases)


async def test_the_end(backend: Backend) -> None:
    """Stopping the finder fails all waiting requests, and leaves permits in use valid (C26)."""
    desk = await desk_of(backend, slots=2)
    first, second = await desk.permit(), await desk.permit()
    waiting = asyncio.create_task(awaited(await desk.place()))
    later = await desk.place()
    await asyncio.sleep(0)
    desk.failing.held = {"release"}
    releasing = asyncio.create_task(second.release())
    await until(lambda: desk.failing.calls["release"] == 1)
    closing = asyncio.create_task(desk.finder.aclose())
    with pytest.raises(BackendUnavailable):
        await waiting
    with pytest.raises(BackendUnavailable):
        await later
    desk.failing.held.clear()
    await asyncio.gather(closing, releasing)
    assert not desk.finder._releases
    assert await free(desk.pool, "flux") == 1
    await desk.pool.acquire("flux", "another", ttl=60)
    assert isinstance(await desk.find(), FoundNone)
    await first.release()


async def test_spare_slots_of_others_are_used(backend: Backend) -> None:
    """A slot that another dispatcher holds in reserve, without a job, is given to a waiting request (C19)."""
    desk = await desk_of(backend)
    (spare,) = await desk.pool.acquire("flux", "another", ttl=60)
    await desk.place()
    await asyncio.sleep(0.06)
    gc.collect()
    await until(lambda: not desk.waiters.wanting("flux"))
    await desk.permit_kept()
    assert await desk.pool.renew(spare, ttl=60) == (None,)


@pytest.mark.parametrize(
    ("field", "model", "more"),
    [
        ("model", "", {}),
        ("tenant", "flux", {"tenant": "two words"}),
        ("request_id", "flux", {"request_id": "{x}"}),
        ("request_id", "flux", {"request_id": "x" * 200}),
        ("timeout", "flux", {"timeout": -1}),
    ],
)
async def test_what_cannot_be(backend: Backend, field: str, model: str, more: Any) -> None:
    """An invalid argument is refused with the name of its field (B9)."""
    desk = await desk_of(backend)
    with pytest.raises(InvalidInput) as caught:
        await desk.find(model, **more)
    assert caught.value.field == field


async def test_a_model_that_was_registered_elsewhere(backend: Backend) -> None:
    """A model that another process has just registered is found (C12)."""
    desk = await desk_of(backend)
    other = await registry_of(backend)
    await other.register("sdxl", "b", URL, 1)
    await well(backend, "sdxl", "b")
    assert (await desk.permit("sdxl")).server == "b"


async def test_many_at_once(backend: Backend) -> None:
    """With many concurrent requests, some of them cancelled, no slot has two holders and none is lost (B6, B7, B10)."""
    slots, holders, most = 3, 0, 0
    desk = await desk_of(backend, slots=slots)
    done, full = asyncio.Event(), asyncio.Event()

    async def runner() -> None:
        async with desk.pool.slot_signal("flux") as signal:
            while not done.is_set():
                await desk.serve()
                await signal.wait(0.02)

    async def one(number: int) -> None:
        nonlocal holders, most
        found = await desk.find(tenant=f"t{number % 4}")
        assert not isinstance(found, FoundNone)
        permit = await found if isinstance(found, FoundQueued) else found.permit
        async with permit:
            holders += 1
            most = max(most, holders)
            try:
                if holders == slots:
                    full.set()
                await full.wait()
                await asyncio.sleep(0.001 * (number % 3))
            finally:
                holders -= 1

    serving = asyncio.create_task(runner())
    tasks = [asyncio.create_task(one(number)) for number in range(150)]
    for task in tasks[::7]:
        await asyncio.sleep(0.001)
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
    done.set()
    await serving
    gc.collect()
    await until(lambda: is_free(desk, slots))
    assert most == slots
    assert not desk.renewer._held
    assert not desk.waiters._queues
