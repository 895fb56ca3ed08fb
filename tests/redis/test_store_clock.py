"""The store's time when the clock of Redis is set back or forward."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, LEASE, PATIENCE, housekept, opened, publish, take
from tests.redis.clocks import WallClock
from tests.redis.engines import Engine
from tests.redis.servers import RedisServer

HOUR = 3600.0


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    """A wall clock that the tests of this module set."""
    return WallClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def server(clock: WallClock, each_engine: Engine, tmp_path: Path) -> Iterator[RedisServer]:
    """A server with this clock, which is right at first."""
    clock.set(0.0)
    server = RedisServer(each_engine, tmp_path / "redis")
    server.environment = clock.environment
    with server:
        yield server


@pytest.fixture
async def backend(server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend on this server."""
    async with opened(server.url, redis_prefix) as backend:
        yield backend


async def store_time(backend: RedisBackend) -> float:
    """Return the store's time, read by a script."""
    name = backend._context.scripts.partitions.names[0]
    return int(await backend._context.scripts.run("join", name, "clock", "clock", 0)) / 1e6


async def passed(backend: RedisBackend, since: float, seconds: float = 0.01) -> float:
    """Wait, and return the store's time, which must not be before ``since``. Redis reads its clock once in a ms."""
    await asyncio.sleep(seconds)
    now = await store_time(backend)
    assert now >= since
    return now


async def test_it_never_decreases(backend: RedisBackend, clock: WallClock) -> None:
    """U29: after steps back, the store's time continues at the normal pace, and it is right once the clock is."""
    now = await store_time(backend)
    for offset in (-HOUR, -2 * HOUR, -2 * HOUR - 0.02, -2 * HOUR - 0.025, -HOUR):
        clock.set(offset)
        now = await passed(backend, now)
    before, local = now, time.monotonic()
    now = await passed(backend, now, 0.5)
    assert now - before == pytest.approx(time.monotonic() - local, abs=0.1)
    clock.set(0.0)
    now = await passed(backend, now)
    assert now == pytest.approx(time.time(), abs=1.0)
    clock.set(-HOUR)
    now = await passed(backend, now)
    clock.set(HOUR)  # ahead of the store's time, so the store follows
    assert await passed(backend, now) == pytest.approx(time.time() + HOUR, abs=1.0)


async def test_random_steps(backend: RedisBackend, clock: WallClock) -> None:
    """U29: whatever the steps of the clock, small and large, the store's time never decreases by a millisecond."""
    chance, now, offset = random.Random(4), 0.0, 0.0
    for _ in range(200):
        offset += chance.choice((-1, 1)) * 10 ** chance.uniform(-4, 4)
        clock.set(offset)
        await asyncio.sleep(0.002)
        for _ in range(3):
            later = await store_time(backend)
            assert later > now - 0.001
            now = max(now, later)


async def test_calls_continue(
    backend: RedisBackend, clock: WallClock, caplog: pytest.LogCaptureFixture
) -> None:
    """U29: after a step back, receives end in time, tasks become due, and a rate limit allows deliveries again."""
    settings = QueueSettings(rate_limit=RateLimit(max_tokens=2))
    await backend.control.configure(KEY, settings)
    async with backend.subscribe([KEY], "c") as consumer, housekept(backend):
        await publish(backend, "a", "b", "c")
        assert len((await consumer.receive(10, 0)).deliveries) == 2
        due = Task.of("later", "d", id="d", not_before=backend.now() + 0.5)
        await backend.publisher.publish(due)
        clock.set(-HOUR)
        async with asyncio.timeout(PATIENCE), backend.subscribe(["later"], "d") as other:
            await other.receive(1, 0)
            await consumer.receive(1, 0)
            assert [d.task.id for d in (await other.receive(1, None)).deliveries] == ["d"]
            await take(consumer, 1)
        assert (await backend.health()).details["clock_steps"] == 1
    step = re.search(r"was set back by (\d+\.\d) s", caplog.text)
    assert step
    assert abs(float(step[1]) - HOUR) < PATIENCE


async def test_a_dead_consumer(
    backend: RedisBackend, server: RedisServer, redis_prefix: str, clock: WallClock
) -> None:
    """U29: the deliveries of a killed consumer come back after the lease, although the clock was set back."""
    async with opened(server.url, redis_prefix) as dead:
        await publish(dead, "a")
        lost = dead.subscribe([KEY], "dead")
        await take(lost, 1)
        await dead._context.heartbeat.aclose()
        clock.set(-HOUR)
        async with (
            asyncio.timeout(PATIENCE),
            housekept(backend),
            backend.subscribe([KEY], "heir") as heir,
        ):
            ((delivery),) = (await heir.receive(1, None)).deliveries
    assert delivery.losses == 1
    assert LEASE < PATIENCE


async def test_a_store_with_another_clock(
    server: RedisServer, redis_prefix: str, clock: WallClock
) -> None:
    """U29: the first receive takes as long as its timeout, even if the clocks of store and process differ."""
    for offset in (-HOUR, HOUR):
        clock.set(offset)
        async with (
            opened(server.url, f"{redis_prefix}{offset > 0}") as backend,
            backend.subscribe([KEY], "c") as consumer,
        ):
            began = time.monotonic()
            async with asyncio.timeout(PATIENCE):
                await consumer.receive(1, 0.3)
            assert time.monotonic() - began >= 0.3
