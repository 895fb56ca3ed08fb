"""Maintenance keeps up with any amount of work, without more than its share of the store's time; a purge is exact."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer import maintenance
from taskqueue_core.consumer.maintenance import run_passes
from taskqueue_redis import RedisBackend, control
from tests.redis.backends import KEY, opened, publish, stream, take, until
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer
from tests.redis.test_maintenance import command, fallen_silent

WINDOW = 300.0


@pytest.fixture
def clock() -> ManualClock:
    """A manual clock that gives the backend its time."""
    return ManualClock(1_700_000_000.0)


@pytest.fixture
async def backend(
    redis_url: str, redis_prefix: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RedisBackend]:
    """A backend whose maintenance does four units of each kind of work in a pass."""
    monkeypatch.setattr(control, "_CHUNK", 4)
    async with opened(redis_url, redis_prefix, clock=clock, lease=60.0) as backend:
        yield backend


async def catch_up(backend: RedisBackend) -> list[Maintained]:
    """Run maintenance passes until one has left nothing."""
    passes = [await backend.control.maintain()]
    while passes[-1].behind is not None:
        assert passes[-1].again_in is not None
        passes.append(await backend.control.maintain())
    # The load probably continues, so the next pass is soon; if it finds little, the usual interval follows.
    soon = 0.5 if len(passes) > 1 else None
    assert passes[-1].again_in == soon
    assert (await backend.control.maintain()).again_in is None
    return passes


@pytest.mark.parametrize(
    "what", ["promoted", "expired", "forgotten", "results", "recovered", "hung"]
)
async def test_a_pass_that_leaves_work_is_followed_by_another(
    backend: RedisBackend, clock: ManualClock, what: str
) -> None:
    """Law 10, issue 21: whatever work is left, the pass names its delay, and the next pass starts at once."""
    ids, now = [f"t{n}" for n in range(15)], clock.now()
    times: dict[str, Any] = {"promoted": {"not_before": now + 5}, "expired": {"deadline": now + 5}}
    hangs = 5.0 if what == "hung" else None
    settings = QueueSettings(result_ttl=WINDOW, max_processing_time=hangs)
    await backend.control.configure(KEY, settings)
    await publish(backend, *ids, **times.get(what, {}))
    async with backend.subscribe([KEY], "c") as consumer:
        if what not in times:
            taken = await take(consumer, 15)
            if what in {"forgotten", "results"}:
                results = [b"1" if what == "results" else None] * 15
                await consumer.ack(*taken, results=results)
        assert (await backend.control.maintain()).again_in is None
        if what == "recovered":
            await fallen_silent(backend, consumer.token)
        await clock.advance(WINDOW if what in {"forgotten", "results"} else 6.0)
        passes = await catch_up(backend)
    number = {
        "promoted": sum(done.promoted for done in passes),
        "expired": sum(len(done.expired) for done in passes),
        "forgotten": sum(done.forgotten for done in passes),
        "recovered": sum(done.recovered for done in passes),
    }
    kind = {"results": "forgotten", "hung": "recovered"}.get(what, what)
    assert number == {**dict.fromkeys(number, 0), kind: 15}
    assert len(passes) in {4, 5}


async def test_one_process_continues(
    backend: RedisBackend, redis_url: str, redis_prefix: str, clock: ManualClock
) -> None:
    """Law 10, issue 21: of several processes one continues at once, until it is done or has stopped."""
    await publish(backend, *(f"t{n}" for n in range(40)), deadline=clock.now() + 5)
    await clock.advance(10)
    async with opened(redis_url, redis_prefix, clock=clock, lease=60.0) as other:
        for _ in range(2):
            first, second = await backend.control.maintain(), await other.control.maintain()
            assert (first.behind, second.behind) == (5.0, 5.0)
            assert first.again_in is not None
            assert second.again_in is None
        claim = await command(backend, "HGET", ":meta", "sweeper")
        process, *_ = claim.split(b":")  # the first process stops, so its claim expires
        await command(backend, "HSET", ":meta", "sweeper", process + b":1:1")
        assert (await other.control.maintain()).again_in is not None
        assert (await backend.control.maintain()).again_in is None
        assert len(await catch_up(other)) == 4
        await publish(backend, *(f"u{n}" for n in range(10)), deadline=clock.now() + 5)
        await clock.advance(10)
        assert (await backend.control.maintain()).again_in is not None


@pytest.mark.parametrize("leaves", [False, True])
async def test_large_bodies_count_as_more(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch, *, leaves: bool
) -> None:
    """Law 10, issue 21: a pass moves a limited number of bytes, so large bodies are divided into more passes."""
    monkeypatch.setattr(control, "_CHUNK", 500)
    body = b'"' + b"x" * (256 * 1024 - 2) + b'"'
    await publish(backend, *(f"t{n}" for n in range(20)), payload=body)
    async with backend.subscribe([KEY], "c") as consumer:
        await take(consumer, 20)
        if leaves:
            (name,) = backend._context.scripts.partitions.names
            runs = [await backend._context.scripts.run("leave", name, consumer.token, 500)]
            ledger = await backend.control.ledger(KEY)
            assert (runs, ledger.in_flight) == ([0], 4)
        else:
            await backend.control.maintain()
            await fallen_silent(backend, consumer.token)
            assert [done.recovered for done in await catch_up(backend)] == [16, 4]


async def test_lanes_count_as_well(backend: RedisBackend) -> None:
    """Law 10, issue 21: taking back a consumer that had deliveries of many queues is divided into several passes."""
    keys = [f"{KEY}{n}" for n in range(20)]
    for key in keys:
        await publish(backend, "t", key=key)
    async with backend.subscribe(keys, "c") as consumer:
        await consumer.ack(*await take(consumer, 20))
        await backend.control.maintain()
        await fallen_silent(backend, consumer.token)
        assert len(await catch_up(backend)) == 6
        assert await command(backend, "EXISTS", f":o:{consumer.token}") == 0


async def test_many_lost_deliveries(
    redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 10, issue 21: all deliveries of a killed consumer return in passes that follow each other at once."""
    async with opened(redis_url, redis_prefix, lease=60.0) as backend:
        await publish(backend, *(f"t{n}" for n in range(3000)))
        async with backend.subscribe([KEY], "c") as consumer:
            await take(consumer, 3000)
            await backend.control.maintain()
            await fallen_silent(backend, consumer.token)
            first = await backend.control.maintain()
            assert first.again_in is not None
            monkeypatch.setattr(maintenance, "_EVERY", 0.0)  # of the first pass only

            class Once:
                async def maintain(self) -> Maintained:
                    monkeypatch.setattr(maintenance, "_EVERY", 3600.0)
                    return await backend.control.maintain()

            inner: Any = Once()
            loop = asyncio.create_task(run_passes(inner))
            await until(lambda: ready(backend, 3000), "all deliveries have returned")
            loop.cancel()
            await asyncio.wait([loop])


async def ready(backend: RedisBackend, number: int) -> bool:
    """Return whether this number of tasks waits."""
    return (await backend.control.ledger(KEY)).waiting == number


async def purge_steps(backend: RedisBackend, budget: int = 4) -> AsyncIterator[int]:
    """Run a purge in steps of ``budget`` tasks; yield the number of each."""
    (name,) = backend._context.scripts.partitions.names
    over, position = 0, b""
    while not over:
        number, over, position = await backend._context.scripts.run(
            "purge", name, KEY, position, budget
        )
        yield number


@pytest.mark.parametrize("together", [False, True])
async def test_a_purge_finds_scheduled_tasks_behind_newer_ones(
    backend: RedisBackend, clock: ManualClock, *, together: bool
) -> None:
    """Law 10, issue 21: a purge ends all scheduled tasks, although others come with the same or earlier times."""
    at = clock.now() + 7200
    await publish(backend, *(f"old{n:02}" for n in range(20)), not_before=at)
    ended, steps = 0, 0
    async for number in purge_steps(backend):
        ended, steps = ended + number, steps + 1
        earlier = at if together else at - 60 + steps
        await publish(backend, *(f"new{steps}-{n}" for n in range(3)), not_before=earlier)
    statuses = await backend.control.statuses(KEY, *(f"old{n:02}" for n in range(20)))
    assert {status and status.state for status in statuses} == {"cancelled"}
    ledger = await backend.control.ledger(KEY)
    assert (ended, ledger.cancelled, ledger.scheduled) == (20, 20, 3 * steps)


async def test_a_purge_ends_tasks_that_become_due_during_it(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, clock: ManualClock
) -> None:
    """Law 10, issue 21: scheduled tasks that become due while a purge runs end with it, and are counted by it."""
    await publish(backend, *(f"w{n}" for n in range(10)))
    await publish(backend, *(f"old{n}" for n in range(10)), not_before=clock.now() + 5)
    async with backend.subscribe([KEY], "c") as consumer:
        ended, steps = 0, 0
        async for number in purge_steps(backend):
            ended, steps = ended + number, steps + 1
            if steps == 1:
                await clock.advance(6)
                await publish(backend, "new")
                await backend.control.maintain()
        assert ended == 20
        assert [one.task.id for one in await take(consumer, 1)] == ["new"]
        recounted(redis_server, redis_prefix)
        # The purge is over: tasks that become due later are delivered.
        await publish(backend, "later", not_before=clock.now() + 5)
        await clock.advance(6)
        assert [one.task.id for one in await take(consumer, 1)] == ["later"]


async def test_a_purge_that_was_given_up(backend: RedisBackend, clock: ManualClock) -> None:
    """Law 10, issue 21: a minute after the last call of an unfinished purge, due tasks are made available again."""
    await publish(backend, *(f"t{n}" for n in range(8)), not_before=clock.now() + 100)
    async for _ in purge_steps(backend):
        break
    await clock.advance(101)
    async with backend.subscribe([KEY], "c") as consumer:
        assert len(await take(consumer, 4)) == 4


async def test_a_purge_counts_bytes(backend: RedisBackend, redis_prefix: str) -> None:
    """Law 10, issue 21: a step of a purge reads a limited number of bytes, and removes nothing twice."""
    body = b'"' + b"x" * (256 * 1024 - 2) + b'"'
    await publish(backend, *(f"t{n}" for n in range(40)), payload=body)
    assert [number async for number in purge_steps(backend, 100)] == [16, 16, 8]
    assert await command(backend, "XLEN", stream(redis_prefix)[len(f"{{{redis_prefix}:0}}") :]) == 0
