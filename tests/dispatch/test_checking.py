"""Tests of health checks: endpoints report their active jobs, and slots are freed accordingly."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import Seen, slots_of
from taskqueue_dispatch.lease_renewal import LeaseRenewer
from taskqueue_memory import MemoryBackend
from tests.dispatch.desk import URL, Servers, registry_of, settings
from tests.dispatch.keepers import LEASE, Desk, is_healthy, running
from tests.dispatch.patience import until


@pytest.fixture
def desk() -> Desk:
    """Return a lease renewer with a manual clock."""
    return Desk()


async def test_a_new_endpoint_is_looked_at_at_once(backend: Backend) -> None:
    """A new endpoint is checked at once, also if it is registered while the checks run (C12, C22)."""
    registry, servers = await registry_of(backend), Servers()
    servers.say = {"a": Seen(active=0), "b": Seen(active=0)}
    renewer = LeaseRenewer(slots_of(backend), registry, servers, settings(health_interval=3600))
    await registry.register("flux", "a", URL, 1)
    async with running(renewer):
        await until(lambda: is_healthy(backend, "a"))
        await registry.register("flux", "b", URL, 1)
        await until(lambda: is_healthy(backend, "b"))
    assert servers.asked == {"a": 1, "b": 1}


async def test_one_failure_is_looked_at_again(desk: Desk) -> None:
    """An endpoint becomes unhealthy after two failed checks in a row, not after one (C22, OPEN-B3)."""
    await desk.registry.register("flux", "a", URL, 1)
    desk.servers.say["a"] = Seen(active=0)
    await desk.check()
    assert await desk.healthy()
    desk.servers.say["a"] = None
    await desk.clock.advance(10)
    await desk.check()
    assert await desk.healthy()
    await desk.check()
    assert desk.servers.asked["a"] == 2, "the endpoint was not checked early"
    desk.servers.say["a"] = Seen(active=0)
    await desk.clock.advance(1)
    await desk.check()
    desk.servers.say["a"] = None
    for healthy in (True, False):
        await desk.clock.advance(10)
        await desk.check()
        assert await desk.healthy() is healthy
    desk.servers.say["a"] = Seen(active=0)
    await desk.clock.advance(10)
    await desk.check()
    assert await desk.healthy()


async def test_a_poke(desk: Desk) -> None:
    """``check_soon`` makes an endpoint due at once, and also takes effect while a check of it is running (C23)."""
    await desk.registry.register("flux", "a", URL, 1)
    desk.servers.say["a"] = Seen(active=0)
    await desk.check()
    desk.renewer.checks.check_soon("flux", "a")
    desk.renewer.checks.check_soon("flux", "nobody")
    desk.servers.gate.clear()
    ((info, config, watch),) = desk.renewer.checks.due()
    check = asyncio.create_task(desk.renewer.checks.check(info, config, watch))
    await until(lambda: desk.servers.asked["a"] == 2)
    assert desk.renewer.checks.due() == []
    desk.renewer.checks.check_soon("flux", "a")
    desk.servers.gate.set()
    await check
    assert len(desk.renewer.checks.due()) == 1


async def test_who_does_not_report_is_left_alone(desk: Desk) -> None:
    """An endpoint registered with ``reports=False`` is never checked, and a removed endpoint is forgotten (C22)."""
    await desk.registry.register("flux", "mute", URL, 1, reports=False)
    await desk.registry.register("flux", "a", URL, 1)
    await desk.check()
    assert desk.servers.asked == {"a": 1}
    await desk.registry.remove("flux", "a")
    await desk.check()
    assert not desk.renewer.checks._watches


async def test_checks_are_bounded() -> None:
    """At most 32 endpoints are checked at the same time, and one that hangs does not block the others (C22)."""
    backend, servers = MemoryBackend(), Servers()
    registry = await registry_of(backend)
    for number in range(100):
        await registry.register("flux", f"s{number}", URL, 1)
        servers.say[f"s{number}"] = Seen(active=0)
    servers.gate.clear()
    renewer = LeaseRenewer(backend.slots, registry, servers, settings(health_interval=0.2))
    async with running(renewer):
        await until(lambda: servers.at_once == 32)
        await until(lambda: len(servers.asked) == 100, "checks that hang are given up")
        servers.gate.set()
        await until(lambda: _all_healthy(backend))
    assert servers.most_at_once == 32


async def _all_healthy(backend: Backend) -> bool:
    return all(info.healthy for info in (await slots_of(backend).inspect()).endpoints)


async def test_a_report_that_was_slow(desk: Desk) -> None:
    """A report counts from when its server was asked, because it may be from before a job arrived (U26, fault H4)."""
    (held,) = await desk.take(1)
    await desk.assign(held, "job")
    desk.servers.say["a"] = Seen(active=0, jobs=frozenset())
    await desk.check()
    desk.renewer.checks.check_soon("flux", "a")
    desk.servers.gate.clear()
    ((info, config, watch),) = desk.renewer.checks.due()
    check = asyncio.create_task(desk.renewer.checks.check(info, config, watch))
    await until(lambda: desk.servers.asked["a"] == 2)
    await desk.clock.advance(6)
    desk.servers.gate.set()
    await check
    assert not held.lost.is_set(), "the job may have arrived after the server was asked"
    await desk.clock.advance(5)
    desk.renewer.checks.check_soon("flux", "a")
    await desk.check()
    assert held.lost.is_set()


async def test_a_server_that_restarted(desk: Desk) -> None:
    """The slots of a restarted server are freed after two equal health reports.

    The leases of these slots are marked as lost (C22, C23, FIX-C5).
    """
    held, other = await desk.take(2)
    await desk.assign(held, "job")
    await desk.assign(other, "kept")
    desk.servers.say["a"] = Seen(active=1, jobs=frozenset({"kept"}))
    await desk.check()
    await desk.clock.advance(4)
    desk.renewer.checks.check_soon("flux", "a")
    await desk.check()
    assert not held.lost.is_set(), "the reports are too close to each other"
    await desk.clock.advance(1)
    desk.renewer.checks.check_soon("flux", "a")
    await desk.check()
    assert held.lost.is_set()
    assert not other.lost.is_set()
    assert [lease.job for lease in (await desk.backend.slots.inspect()).leases] == ["kept"]


async def test_a_lease_that_ran_out_is_looked_at_sooner(desk: Desk) -> None:
    """The slot of a dead dispatcher is freed once its lease has expired and the endpoint is idle.

    Two idle reports, ``settled`` seconds apart, are needed (C20, C23).
    """
    (held,) = await desk.take()
    await desk.assign(held, "job")
    desk.renewer.drop(held)
    desk.servers.say["a"] = Seen(active=0)
    await desk.check()
    desk.servers.say["a"] = Seen(active=1)
    await desk.clock.advance(10)
    await desk.check()
    await desk.clock.advance(LEASE)
    await desk.registry.refresh()
    desk.servers.say["a"] = Seen(active=0)
    await desk.check()
    assert len((await desk.backend.slots.inspect()).leases) == 1
    await desk.clock.advance(5)
    await desk.check()
    assert (await desk.backend.slots.inspect()).leases == ()


async def test_a_job_that_is_missing_is_looked_at_sooner(desk: Desk) -> None:
    """A server without a job that has a slot is checked again after ``settled`` seconds (U26, C22, C23).

    So after the start of a dispatcher, slots of ended jobs are idle for no longer than that. A server with all its jobs
    is not checked sooner, and neither is one whose job has just ended.
    """
    held, _ = await desk.take(2)
    await desk.assign(held, "job")
    desk.renewer.drop(held)
    for seen, pause in (
        (Seen(active=1, jobs=frozenset({"job"})), 10),
        (Seen(active=1), 10),
        (Seen(active=1, jobs=frozenset({"other"})), 5),
        (Seen(active=0), 5),
    ):
        desk.servers.say["a"] = seen
        await desk.registry.refresh()
        desk.renewer.checks.check_soon("flux", "a")
        await desk.check()
        assert desk.renewer.checks._watches["flux", "a"].due == desk.clock.now() + pause, seen
    await desk.backend.slots.release(held.lease)
    desk.renewer.checks.check_soon("flux", "a")
    await desk.check()
    assert desk.renewer.checks._watches["flux", "a"].due == desk.clock.now() + 10


async def test_the_silence_of_a_server(desk: Desk) -> None:
    """The time since a server's last answer is known, so that its jobs can be given up (U26, C23)."""
    checks = desk.renewer.checks
    await desk.registry.register("flux", "a", URL, 1)
    assert checks.silence(("flux", "nobody")) == float("inf")
    desk.servers.say["a"] = Seen(active=0)
    await desk.check()
    await desk.clock.advance(10)
    assert checks.silence(("flux", "a")) == 0
    desk.servers.say["a"] = None
    await desk.check()
    assert checks.silence(("flux", "a")) == 10


async def test_all_are_looked_at_after_a_pool_was_emptied(desk: Desk) -> None:
    """After the slot pool was emptied, all endpoints are checked again at once (fault H9)."""
    await desk.registry.register("flux", "a", URL, 1)
    await desk.registry.refresh()
    desk.servers.say["a"] = Seen(active=0)
    await desk.check()
    other = MemoryBackend(clock=desk.clock)
    desk.registry._pool = desk.renewer.checks._pool = cast("Any", other.slots)
    await desk.registry.refresh()
    assert len(desk.renewer.checks.due()) == 1


async def test_looks_are_spread(desk: Desk) -> None:
    """The interval between two checks varies by a fifth, so that dispatchers do not check at the same moments (C22)."""
    await desk.registry.register("flux", "a", URL, 1)
    desk.servers.say["a"] = Seen(active=0)
    for share, pause in ((0.0, 8.0), (0.5, 10.0), (1.0, 12.0)):
        desk.renewer.checks._uniform = lambda share=share: share  # type: ignore[misc] # bound now
        desk.renewer.checks.check_soon("flux", "a")
        await desk.check()
        assert desk.renewer.checks._watches["flux", "a"].due == desk.clock.now() + pause
