"""Tests with the promised sizes, where the normal tests use smaller ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest

from taskqueue_core.tasks import Ledger
from taskqueue_redis import RedisBackend
from tests.prefect.replicas import Replica, Site, executed, worker
from tests.prefect.support import Taker

pytestmark = pytest.mark.chaos
Pair = tuple[Replica, Replica]
RUNS = 200
PATIENT = {"TASKQUEUE_REDIS_LEASE": "5"}


@pytest.fixture(scope="module")
def patient(site: Site) -> Iterator[Pair]:
    """Yield two replicas with a lease that is shorter than the runs."""
    one, other = Replica(site, "a", **PATIENT), Replica(site, "b", **PATIENT)
    with one.start(), other.start():
        yield one.ready(), other.ready()


async def ledger(backend: RedisBackend) -> Ledger:
    """Return the sum of the ledgers of all queues."""
    found = [await backend.control.ledger(key) for key in await backend.control.queues()]
    return sum(found, Ledger())


async def test_two_hundred_delays(patient: Pair, site: Site, backend: RedisBackend) -> None:
    """Row E1: two hundred calls of ``.delay()`` at one replica are executed once each by a worker of the other."""
    a, b = patient
    with worker(site, "w", b.api):
        runs = await asyncio.to_thread(site.run, "delay.py", str(RUNS), "one-", api=a.api)
        await asyncio.to_thread(a.all_reach, "Completed", runs)
    done = [name for name in executed(site) if name.startswith("one-")]
    assert sorted(done) == sorted(f"one-{n}" for n in range(RUNS))
    assert (await ledger(backend)).dead == 0


async def test_eight_of_eight_seconds(patient: Pair, site: Site, backend: RedisBackend) -> None:
    """Rows E8, E6: eight runs of 8 s with two workers, one run at a time and a lease of 5 s, are executed once each."""
    a, b = patient
    with worker(site, "w1", a.api, 1), worker(site, "w2", b.api, 1):
        runs = await asyncio.to_thread(site.run, "delay.py", "8", "long-", "8", api=a.api)
        await asyncio.to_thread(a.all_reach, "Completed", runs, 120)
    done = [name for name in executed(site) if name.startswith("long-")]
    assert sorted(done) == [f"long-{n}" for n in range(8)]
    found = await ledger(backend)
    assert (found.dead, found.waiting, found.in_flight) == (0, 0, 0)


async def test_eight_seconds_later(patient: Pair) -> None:
    """Row REV-E2: a run that is scheduled 8 s ahead is sent after 8 s, and at most a second later."""
    a, b = patient
    name = f"add-{uuid4().hex[:8]}"
    async with Taker(b.socket, name) as taker:
        at = datetime.now(UTC) + timedelta(seconds=8)
        run = a.created(name, scheduled_time=at.isoformat())
        assert (await taker.receive(20))["id"] == run
        assert at <= datetime.now(UTC) < at + timedelta(seconds=1)
        await taker.ack()
