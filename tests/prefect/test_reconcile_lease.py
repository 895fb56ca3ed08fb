"""Tests of the lease by which one of all processes reconciles, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from taskqueue_core.tasks import State
from taskqueue_memory import MemoryBackend
from taskqueue_prefect.reconcile import KEY, ReconcileLease
from taskqueue_redis import RedisBackend
from tests.prefect.replicas import Site
from tests.redis.backends import PATIENCE, fall_silent, opened

PREFIX = "lease"


def lease_of(backend: Any) -> ReconcileLease:
    """Return the lease of a process with this backend."""
    return ReconcileLease(SimpleNamespace(backend=backend, control=backend.control))  # type: ignore[arg-type]


@pytest.fixture
async def two(site: Site) -> AsyncIterator[tuple[RedisBackend, RedisBackend]]:
    """Two backends of one store, as two processes have them."""
    async with opened(site.redis.url, PREFIX) as one, opened(site.redis.url, PREFIX) as other:
        yield one, other


async def test_one_process_at_a_time(two: tuple[RedisBackend, RedisBackend]) -> None:
    """Row U26 (D3): one process has the lease; another one gets it when the first releases it."""
    first, second = map(lease_of, two)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert (await first.is_held(), await second.is_held()) == (True, False)
    await first.release()
    async with asyncio.timeout(PATIENCE):
        await waiting
    assert (await first.is_held(), await second.is_held()) == (False, True)
    await second.release()


async def test_a_process_that_is_lost(site: Site, two: tuple[RedisBackend, RedisBackend]) -> None:
    """Row U26 (D3): a process that is suspended loses the lease; losses never make its task a dead letter."""
    first, second = map(lease_of, two)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    subscription: Any = first._subscription
    await fall_silent(site.redis, two[0], subscription.token)
    async with asyncio.timeout(PATIENCE):
        while not waiting.done():
            await two[1].control.maintain()
            await asyncio.sleep(0.02)
    await waiting
    assert (await first.is_held(), await second.is_held()) == (False, True)
    (status,) = await two[1].control.statuses(KEY, "lease")
    assert status is not None
    assert status.losses == 0
    await second.release()


@pytest.mark.parametrize("end", [State.DONE, State.DEAD, State.CANCELLED])
async def test_a_lease_that_was_ended(two: tuple[RedisBackend, RedisBackend], end: State) -> None:
    """Row U26 (D3): if another client or damage has ended the task, one of the processes gets the lease again."""
    leases = [lease_of(backend) for backend in two]
    control = two[1].control
    await leases[0].acquire()
    if end is State.CANCELLED:
        await control.cancel(KEY, "lease")
    else:
        await leases[0].release()
        async with two[1].subscribe([KEY], "stranger") as stranger:
            (delivery,) = (await stranger.receive(1, PATIENCE)).deliveries
            if end is State.DONE:
                await stranger.ack(delivery)
            else:
                await stranger.dead_letter(delivery, "corrupt")
    (status,) = await control.statuses(KEY, "lease")
    assert status is not None
    assert status.state is end
    assert not await leases[0].is_held()
    waiting = {asyncio.create_task(lease.acquire()) for lease in leases}
    done, waiting = await asyncio.wait(
        waiting, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
    )
    assert (len(done), len(waiting)) == (1, 1)
    assert sorted([await lease.is_held() for lease in leases]) == [False, True]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for lease in leases:
        await lease.release()


async def test_processes_that_share_nothing() -> None:
    """Row U26 (D3): with a backend that is not shared, each process reconciles, and has no queue for it."""
    backend = MemoryBackend()
    lease = lease_of(backend)
    await lease.acquire()
    assert await lease.is_held()
    assert await backend.control.queues() == ()
    await lease.release()
