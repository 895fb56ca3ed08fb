"""Tests of the line in which callers wait for a slot: its order, its capacity, and how callers leave it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Order, Seen
from taskqueue_core.errors import InvalidInput
from taskqueue_dispatch.models import ModelConfig, WhenDown
from taskqueue_dispatch.slot_finder import FoundQueued
from taskqueue_dispatch.submit import Reason
from tests.dispatch.desk import free
from tests.dispatch.finders import awaited, desk_of, is_free, reason
from tests.dispatch.patience import PATIENCE, until


async def test_a_release_wakes_the_next(backend: Backend) -> None:
    """A released permit signals a free slot, and waiting callers are served in order of arrival (B2, B7, B10)."""
    desk = await desk_of(backend)
    permit = await desk.permit()
    stirred: list[str] = []
    desk.waiters.on_change("flux", lambda: stirred.append("flux"))
    places = [asyncio.create_task(awaited(await desk.place())) for _ in range(3)]
    assert len(stirred) == 3
    async with desk.pool.slot_signal("flux") as signal:
        for place in places:
            assert await desk.serve() == 0
            ringing = asyncio.create_task(signal.wait(60))
            await permit.release()
            async with asyncio.timeout(PATIENCE):
                await ringing
            assert await desk.serve() == 1
            permit = await place
    assert [place.done() for place in places] == [True] * 3
    desk.waiters.on_change("flux", None)
    await desk.place()
    assert len(stirred) == 3


@pytest.mark.parametrize("order", Order)
async def test_the_two_orders(backend: Backend, order: Order) -> None:
    """First in first out serves in order of arrival; fair order lets tenants take turns by weight (B2, OPEN-B4)."""
    config = ModelConfig(order=order, weights={"gold": 2} if order is Order.FAIR else {})
    desk = await desk_of(backend, config=config)
    permit = await desk.permit()
    got: list[str] = []

    async def wait(tenant: str, place: FoundQueued) -> None:
        async with await place:
            got.append(tenant)

    tenants = [*["a"] * 6, "b", *["gold"] * 12]
    tasks = [asyncio.create_task(wait(one, await desk.place(tenant=one))) for one in tenants]
    await permit.release()
    for number in range(len(tenants)):
        assert await desk.serve() == 1
        await until(lambda number=number: len(got) == number + 1 and not desk.finder._releases)  # type: ignore[misc] # bound now
    await asyncio.gather(*tasks)
    if order is Order.FIFO:
        assert got == tenants
    else:
        assert got[:2] == ["a", "b"], "in order of arrival, and tenants in turn"
        assert got[2:17].count("gold") == 10
        assert got[2:17].count("a") == 5
    assert not desk.waiters._queues


async def test_room_in_line(backend: Backend) -> None:
    """First in first out limits the whole line, and fair order each tenant's part of it (B4, B5, OPEN-B2)."""
    desk = await desk_of(backend, config=ModelConfig(queue_per_slot=2))
    await desk.permit_kept()
    kept = [await desk.place(tenant="a"), await desk.place(tenant="b")]
    assert await reason(desk, "c") is Reason.QUEUE_FULL
    await desk.registry.configure("flux", ModelConfig(queue_per_slot=2, order=Order.FAIR))
    kept += [await desk.place(tenant="a"), await desk.place(tenant="c")]
    assert await reason(desk, "a") is Reason.TENANT_FULL
    desk.waiters._waiting = 10_000
    assert await reason(desk, "d") is Reason.QUEUE_FULL
    assert desk.waiters.wanting("flux") == len(kept)


async def test_who_left_is_gone(backend: Backend) -> None:
    """A caller that is cancelled, timed out or garbage-collected leaves the line at once, and takes no slot (B3)."""
    desk = await desk_of(backend)
    permit = await desk.permit()
    cancelled = asyncio.create_task(awaited(await desk.place()))
    timed_out = await desk.place(timeout=0.01)
    forgotten = await desk.place(tenant="x")
    stays = asyncio.create_task(awaited(await desk.place()))
    await asyncio.sleep(0)
    assert desk.waiters.wanting("flux") == 4
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(TimeoutError):
        await timed_out
    del forgotten
    gc.collect()
    await until(lambda: desk.waiters.wanting("flux") == 1)
    await permit.release()
    assert await desk.serve() == 1
    assert (await stays).server == "a"
    assert not desk.waiters._queues
    assert desk.waiters._waiting == 0


async def test_a_place_times_out_while_it_is_not_awaited(backend: Backend) -> None:
    """A place in the line expires even if it is not awaited, and a slot given to it is released (B3, B7)."""
    desk = await desk_of(backend)
    permit = await desk.permit()
    late = await desk.place(timeout=0.01)
    await until(lambda: not desk.waiters.wanting("flux"))
    with pytest.raises(TimeoutError):
        await late
    given = await desk.place(timeout=0.05)
    await permit.release()
    assert await desk.serve() == 1
    assert await free(desk.pool, "flux") == 0
    await until(lambda: is_free(desk, 1))
    with pytest.raises(TimeoutError):
        await given
    with pytest.raises(InvalidInput):
        await given


async def test_a_slot_that_was_given_to_who_just_left(backend: Backend) -> None:
    """A slot that is given to a caller at the moment when it is cancelled is released (B3, B7)."""
    desk = await desk_of(backend)
    permit = await desk.permit()
    waiting = asyncio.create_task(awaited(await desk.place()))
    await asyncio.sleep(0)
    await permit.release()
    assert await desk.serve() == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: is_free(desk, 1))
    permit = await desk.permit()
    forgotten = await desk.place()
    await permit.release()
    assert await desk.serve() == 1
    del forgotten
    gc.collect()
    await until(lambda: is_free(desk, 1))
    assert not desk.renewer._held


async def test_a_slot_that_was_no_good(backend: Backend) -> None:
    """A caller that is given a lease which is no longer valid keeps its place at the head of the line (B7, B10)."""
    desk = await desk_of(backend)
    permit = await desk.permit()
    first = asyncio.create_task(awaited(await desk.place()))
    second = asyncio.create_task(awaited(await desk.place()))
    await asyncio.sleep(0)
    await permit.release()
    (lease,) = await desk.pool.acquire("flux", "me", ttl=60)
    await desk.pool.release(lease)
    assert desk.waiters.give("flux", desk.renewer.hold(lease))
    await until(lambda: desk.waiters.wanting("flux") == 2)
    assert await desk.serve() == 1
    await (await first).release()
    assert not second.done()
    second.cancel()


async def test_newcomers_do_not_overtake_waiters(backend: Backend) -> None:
    """A free slot goes to a waiting caller, not to one that has just arrived (B2, B9)."""
    desk = await desk_of(backend)
    permit = await desk.permit()
    first = asyncio.create_task(awaited(await desk.place()))
    await asyncio.sleep(0)
    await permit.release()
    second = await desk.place()
    assert second.position == 1
    assert await desk.serve() == 1
    assert (await first).server == "a"


async def test_no_healthy_endpoint_keeps_the_line(backend: Backend) -> None:
    """A short outage of all endpoints removes no caller from the line; new callers may be refused (B11, OPEN-B3)."""
    desk = await desk_of(backend)
    permit = await desk.permit()
    waiting = asyncio.create_task(awaited(await desk.place()))
    await desk.pool.reconcile("flux", "a", None, settled=0)
    await desk.registry.refresh()
    await permit.release()
    assert await desk.serve() == 0
    other = await desk.place()
    assert other.position == 1
    await desk.registry.configure("flux", ModelConfig(when_down=WhenDown.REFUSE))
    assert await reason(desk, "a") is Reason.NO_HEALTHY_ENDPOINT
    assert desk.waiters.wanting("flux") == 2
    await desk.pool.reconcile("flux", "a", Seen(active=0), settled=0)
    assert await desk.serve() == 1
    assert (await waiting).server == "a"


async def test_the_order_changes_live(backend: Backend) -> None:
    """A line can change its order and capacity while callers wait, and no caller is lost (B12, OPEN-B3)."""
    desk = await desk_of(backend, config=ModelConfig(queue_per_slot=100))
    permit = await desk.permit()
    got: list[str] = []

    async def wait(name: str, place: FoundQueued) -> None:
        async with await place:
            got.append(name)

    names = ["a1", "a2", "a3", "a4", "b1", "c1"]
    tasks = [asyncio.create_task(wait(name, await desk.place(tenant=name[0]))) for name in names]
    await permit.release()

    async def one() -> None:
        count = len(got)
        assert await desk.serve() == 1
        await until(lambda: len(got) > count and not desk.finder._releases)

    await one()
    await desk.registry.configure("flux", ModelConfig(order=Order.FAIR, queue_per_slot=1))
    assert desk.waiters.wanting("flux") == 5
    for _ in range(3):
        await one()
    assert {name[0] for name in got[1:4]} == {"a", "b", "c"}
    await desk.registry.configure("flux", ModelConfig(queue_per_slot=0))
    assert desk.waiters.wanting("flux") == 2
    await one()
    await one()
    await asyncio.gather(*tasks)
    assert got[-2:] == ["a3", "a4"]
    assert sorted(got) == names
