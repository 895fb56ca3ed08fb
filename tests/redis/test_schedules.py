"""Schedules on Redis: damaged data, a store without memory, large catch-ups, and several partitions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from taskqueue_core.capabilities import Fire, Run, StoredSchedule
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Published, Refusal, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import opened
from tests.redis.conftest import MakeServer
from tests.redis.servers import RedisServer

START = 1_700_000_000.0
NUMBER = 120


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend of the shared server, with a clock that tests advance."""
    async with opened(redis_server.url, redis_prefix, clock=ManualClock(START)) as backend:
        yield backend


async def put(backend: RedisBackend, name: str, **fields: object) -> StoredSchedule:
    """Put a schedule of the queue ``q``, which is due."""
    present: dict[str, object] = {"key": "q", "spec": b"{}", "next_at": START - 1}
    return await backend.schedules.put(StoredSchedule(name=name, **{**present, **fields}))  # type: ignore[arg-type]


def planned(stored: StoredSchedule, *tasks: Task, next_at: float | None = START + 60) -> Fire:
    """Return the plan of a step."""
    at = stored.next_at or 0.0
    return Fire(
        key=stored.key,
        name=stored.name,
        version=stored.version,
        planned_for=stored.next_at,
        runs=tuple(Run(at + n / 1000, task) for n, task in enumerate(tasks)),
        next_at=next_at,
    )


async def _mended(backend: RedisBackend, server: RedisServer, prefix: str) -> None:
    """Run maintenance until it finds no more damage."""
    meta = f"{{{prefix}:0}}:meta"
    for _ in range(100):
        before = server.call("HGET", meta, "anomalies")
        server.call("HDEL", meta, "checked", "sweeper")
        await backend.control.maintain()
        left = server.call("HGET", meta, "schedule_check")
        if server.call("HGET", meta, "anomalies") == before and left is None:
            return
    raise AssertionError("maintenance always finds damage")


@pytest.mark.parametrize("lost", ["schedules", "schedules:due", "schedules:names"])
@pytest.mark.parametrize("how", ["deleted", "of another type"])
async def test_a_key_that_is_lost(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, lost: str, how: str
) -> None:
    """U13, fault M4: maintenance builds an index or the records of schedules again; all of them fire as planned."""
    names = sorted(f"s{number:03}" for number in range(NUMBER))
    for name in names:
        await put(backend, name)
    name = f"{{{redis_prefix}:0}}:{lost}"
    redis_server.call("DEL", name)
    if how != "deleted":
        redis_server.call("RPUSH", name, "x")
    await _mended(backend, redis_server, redis_prefix)
    listed = await backend.schedules.list(limit=1000)
    assert [schedule.name for schedule in listed] == names
    due = (await backend.schedules.due(1000)).schedules
    assert sorted(schedule.name for schedule in due) == names
    assert {schedule.next_at for schedule in due} == {START - 1}
    fires = [planned(one, Task(key="q", id=f"{one.name}.1")) for one in due]
    assert not any(done.stale for done in await backend.schedules.fire(*fires))


async def test_a_specification_that_is_lost(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U13, fault M4: a schedule without a specification cannot fire; it is deleted, and hides no others."""
    await put(backend, "kept")
    await put(backend, "lost")
    redis_server.call("HDEL", f"{{{redis_prefix}:0}}:schedules:specs", "lost q")
    due = (await backend.schedules.due(1)).schedules or (await backend.schedules.due(1)).schedules
    assert [schedule.name for schedule in due] == ["kept"]
    assert [schedule.name for schedule in await backend.schedules.list()] == ["kept"]
    assert (await backend.health()).details["anomalies"] == 1


@pytest.mark.parametrize("record", ["", "nonsense", "1:\n", "1:17\n"])
async def test_a_damaged_record(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, record: str
) -> None:
    """U13, fault M4: a damaged record is written again with the time in the index, or the index by the record."""
    await put(backend, "s")
    redis_server.call("HSET", f"{{{redis_prefix}:0}}:schedules", "s q", record)
    await _mended(backend, redis_server, redis_prefix)
    (stored,) = await backend.schedules.list()
    due = (await backend.schedules.due(9)).schedules
    assert due == ((stored,) if stored.next_at is not None else ())
    assert stored.next_at in (START - 1, None, 0.000017)


async def test_versions_after_the_loss_of_the_counter(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U13, fault M4: if the last version is lost, the next one is still larger than all before."""
    stored = await put(backend, "s")
    redis_server.call("HDEL", f"{{{redis_prefix}:0}}:meta", "schedules")
    assert (await put(backend, "s")).version > stored.version + 100


async def test_large_catch_up(backend: RedisBackend) -> None:
    """U13: tasks that are too many or too large for one script are published by several, none twice."""
    stored = await put(backend, "many")
    tasks = [Task(key="q", id=f"many.{n}") for n in range(900)]
    large = [
        Task(key="q", id=f"large.{n}", payload=b'"' + b"x" * 200_000 + b'"') for n in range(60)
    ]
    for group in (tasks, large):
        rest = group
        while rest:
            (done,) = await backend.schedules.fire(planned(stored, *rest, next_at=START + 9))
            assert {answer.status for answer in done.confirmations} == {Published.ACCEPTED}
            assert done.confirmations
            rest = rest[len(done.confirmations) :]
            after = await backend.schedules.get("many")
            assert after is not None
            stored = after
        assert stored.next_at == START + 9
        stored = await put(backend, "many")
    assert (await backend.control.ledger("q")).published == 960


async def test_no_memory(make_server: MakeServer, redis_prefix: str) -> None:
    """U13: while Redis has no memory left, instants are refused and stay due; afterwards they are fired."""
    with make_server() as server:
        async with opened(server.url, redis_prefix) as backend:
            stored = await put(backend, "s")
            task = Task(key="q", id="s.1")
            server.call("CONFIG", "SET", "maxmemory", "1")
            (done,) = await backend.schedules.fire(planned(stored, task))
            assert [answer.code for answer in done.confirmations] == [Refusal.STORE_FULL]
            with pytest.raises(BackendUnavailable):
                await backend.schedules.fire(planned(stored))
            with pytest.raises(BackendUnavailable):
                await put(backend, "another")
            assert (await backend.schedules.due(9)).schedules == (stored,)
            server.call("CONFIG", "SET", "maxmemory", "0")
            (done,) = await backend.schedules.fire(planned(stored, task))
            assert done.confirmations[0].status is Published.ACCEPTED


async def test_partitions(redis_server: RedisServer, redis_prefix: str) -> None:
    """U13: schedules of several partitions are listed, due and fired together."""
    clock = ManualClock(START)
    async with opened(redis_server.url, redis_prefix, clock=clock, partitions=4) as backend:
        names = sorted(f"s{number}" for number in range(30))
        for number, name in enumerate(names):
            await put(backend, name, key=f"q{number % 7}", next_at=START - number - 1)
        pages = [await backend.schedules.list(limit=20)]
        pages.append(await backend.schedules.list(limit=20, after=pages[0][-1].name))
        assert [one.name for page in pages for one in page] == names
        due = await backend.schedules.due(30)
        assert [one.name for one in due.schedules] == names[::-1]
        fires = [planned(one, Task(key=one.key, id=f"{one.name}.1")) for one in due.schedules]
        done = await backend.schedules.fire(*fires)
        assert [answer.task_id for one in done for answer in one.confirmations] == [
            f"{name}.1" for name in names[::-1]
        ]
        assert (await backend.schedules.due(30)).schedules == ()
