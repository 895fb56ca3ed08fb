"""Redis is killed, frozen, paused, full, or loses its scripts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from taskqueue_core.capabilities import control_of
from tests.chaos.cases import CHAOS, LONG, passed, small
from tests.chaos.history import What
from tests.chaos.outages import RECOVERY, Outage, suffer
from tests.chaos.world import World
from tests.redis.servers import RedisServer, wait_until


def lengths(short: float, *long: float) -> list[object]:
    """Return the lengths of an outage: the short one for ordinary runs, the others for `dev.py chaos`."""
    return [short, *(pytest.param(length, marks=CHAOS) for length in long)]


@CHAOS
@pytest.mark.parametrize("length", [0.1, 6.0, 30.0, 120.0])
@pytest.mark.parametrize("seed", range(3))
async def test_redis_is_killed(folder: Path, seed: int, length: float) -> None:
    """Fault B1, row A1: a kill of Redis loses nothing confirmed; all processes recover soon without a restart."""
    outage = Outage(fault="B1", kind="kill", length=length)
    outcome, row = await suffer(folder, outage, small(seconds=1.0, liveness=60.0), seed=seed)
    assert passed(outcome).duplicates == 0
    assert not row.problems


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=CHAOS)])
async def test_redis_is_killed_again_and_again(folder: Path, times: int) -> None:
    """Faults B1 and B2: repeated kills of Redis lose nothing, and no process accumulates connections or open files."""
    shape = small(tasks=100 * times, seconds=0.3 * times, liveness=60.0)
    async with World(folder, shape) as world:
        await world.begin()
        before = {actor.name: _files(actor.process.pid) for actor in world.cast.all}
        for _ in range(times):
            await world.inflict("kill", "redis", 0, 0.05)
        after = {a.name: _files(a.process.pid) for a in world.cast.all if a.alive}
        figures = passed(await world.finish())
    assert 0 < figures.recovery.worst <= RECOVERY
    assert all(count <= before[name] + 3 for name, count in after.items()), (before, after)


def _files(pid: int | None) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@LONG
async def test_redis_is_full(folder: Path) -> None:
    """Fault B8: a full Redis refuses publishes, but consumers go on until the queue is empty."""
    shape = small(tasks=300, seconds=0.1, consumers=0)
    async with World(folder, shape) as world:
        await world.begin()
        await world.until(lambda: world.published() == 300, "everything is published")
        world.redis.call("CONFIG", "SET", "maxmemory", "1")
        world.log.note(What.FAULT, name="fill redis", target="redis 0")
        (refused,) = await world.publish(1)
        assert refused.status == "refused"
        for number in range(2):
            await world.start("consumer", number)
        await world.drained(seconds=6.0)
        world.redis.call("CONFIG", "SET", "maxmemory", "0")
        world.log.note(What.HEALED, name="fill redis", target="redis 0")
        figures = passed(await world.finish())
    assert figures.tasks == 300
    assert figures.duplicates == 0


@pytest.mark.parametrize("length", lengths(1.0, 4.0, 10.0, 60.0))
async def test_redis_is_frozen(folder: Path, length: float) -> None:
    """Fault B10: after a freeze of Redis all consumers look idle, but no delivery is taken from a live one."""
    outage = Outage(fault="B10", kind="freeze", length=length)
    shape = small(hold=0.2, seconds=1.0, liveness=60.0, simple=True)
    outcome, row = await suffer(folder, outage, shape)
    figures = passed(outcome)
    assert figures.duplicates == 0
    assert figures.stale == 0
    assert not row.problems


async def test_redis_loads_its_data(folder: Path) -> None:
    """Fault B11: clients that connect while Redis loads its data wait until it is loaded; nothing is lost."""
    shape = small(tasks=0, answer_timeout=5.0, operation_timeout=10.0)
    async with World(folder, shape) as world:
        await world.publish(4000)
        world.redis.config |= {  # Redis 6.2 does not know the second option
            "key-load-delay": "100",
            "loading-process-events-interval-bytes": "1024",
        }
        await asyncio.to_thread(world.redis.kill)
        await asyncio.to_thread(world.redis.start, wait=False)
        await asyncio.to_thread(_seen_loading, world.redis)
        late = world.open_backend(world.redis.port)
        assert (await control_of(late).ledger(world.shape.keys[0])).waiting == 4000
        details = (await late.health()).details
        assert details["redis_append_only"] is True
        for number in range(2):
            await world.start("consumer", number)
        assert passed(await world.finish()).tasks == 4000


def _seen_loading(redis: RedisServer) -> None:
    def loads() -> bool:
        assert redis.running, redis.log()[-2000:]
        return redis.info("persistence")["loading"] == "1"

    wait_until(loads, "Redis loads its data", tick=0.001)


@LONG
async def test_what_redis_may_do_to_its_clients(folder: Path) -> None:
    """Faults B13, B16, B18 together: lost scripts, paused writes and closed idle connections have no visible effect."""
    async with World(folder, small(seconds=1.5)) as world:
        await world.begin()
        await world.inflict("pause", "redis", 0, 0.3)
        world.redis.call("CONFIG", "SET", "timeout", "1")
        for _ in range(15):
            await world.inflict("forget", "redis")
            await asyncio.sleep(0.1)
        figures = passed(await world.finish())
    assert figures.duplicates == 0
    assert figures.tasks == 300
