"""Schedules whose queue gets other shards or another backend move along, and each instant is fired once."""

from __future__ import annotations

from typing import Any

import pytest

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import (
    Due,
    Fire,
    QueueSettings,
    Run,
    StoredSchedule,
    control_of,
    schedules_of,
)
from taskqueue_core.capabilities.schedules import RETRY_SECONDS
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer.firing import fire_due
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.migration import MigratingBackend
from taskqueue_core.migration.steps import rollback, start
from taskqueue_core.schedules import Every, Schedule, Spec, TaskTemplate
from taskqueue_core.sharding.backend import ShardedBackend
from taskqueue_memory import MemoryBackend

START = 1_800_000_000.0
NAMES = [f"s{number}" for number in range(12)]


async def put_all(backend: Backend) -> None:
    """Put schedules of a minute each."""
    for name in NAMES:
        schedule = Schedule(name, Every(60), TaskTemplate(key="q"), "all", overlap="allow")
        text = Spec(schedule=schedule).encode()
        stored = StoredSchedule(key="q", name=name, spec=text, next_at=START + 60)
        await schedules_of(backend).put(stored)


async def fire_all(*backends: Backend) -> None:
    """Fire on several backends in turn, as processes with different knowledge do, until nothing is due."""
    for _ in range(10):
        due = [await fire_due(schedules_of(one), set()) for one in backends]
        if all(not one.schedules and (one.next_at or one.now + 1) > one.now for one in due):
            return
    raise AssertionError("schedules stay due")


async def published(backend: Backend) -> int:
    """Return the number of tasks that were published."""
    return (await control_of(backend).ledger("q")).published


async def check(backend: Backend) -> None:
    """Fail unless each schedule exists once."""
    listed = await schedules_of(backend).list()
    assert [schedule.name for schedule in listed] == sorted(NAMES)
    assert {schedule.key for schedule in listed} == {"q"}


async def test_more_shards() -> None:
    """U13: after changes of the number of shards, schedules fire from the new shards, also for a stale process."""
    clock = ManualClock(START)
    store = MemoryBackend(clock=clock)
    one, stale = ShardedBackend(store), ShardedBackend(store)
    await put_all(one)
    await clock.advance(60)
    await fire_all(stale)
    for shards in (3, 5, 1):
        settings = await one.control.settings("q")
        await one.control.configure("q", settings.model_copy(update={"shards": shards}))
        await clock.advance(60)
        await fire_all(stale, one)
        await clock.advance(RETRY_SECONDS)  # the stale process may have asked the closed shards
        await fire_all(stale, one)
        await check(one)
    assert await published(one) == 4 * len(NAMES)
    inner = await store.schedules.list()
    assert len(inner) == len(NAMES), "a schedule was left behind in a closed shard"
    stored = await schedules_of(one).get("s3")
    assert stored is not None
    assert [outcome.result for outcome in stored.recent] == ["accepted"] * 4
    assert await schedules_of(one).delete("q", "s3", version=stored.version)
    assert await schedules_of(one).get("s3") is None
    await one.aclose()


async def test_a_put_to_a_closed_shard() -> None:
    """U13: what a process puts that does not know the new shards yet replaces the older schedule there."""
    clock = ManualClock(START)
    store = MemoryBackend(clock=clock)
    one, stale = ShardedBackend(store), ShardedBackend(store)
    await put_all(one)
    await schedules_of(stale).list()
    settings = await one.control.settings("q")
    await one.control.configure("q", settings.model_copy(update={"shards": 4}))
    await clock.advance(60)
    await fire_all(one)
    before = await store.schedules.list()
    changed = StoredSchedule(key="q", name="s1", spec=b'{"changed":1}', next_at=clock.now() + 1)
    await store.schedules.put(changed)  # as a stale process does
    assert len(await store.schedules.list()) == len(before) + 1
    await clock.advance(1)
    await schedules_of(one).due(100)
    stored = await schedules_of(one).get("s1", key="q")
    assert stored is not None
    assert stored.spec == changed.spec
    assert len(await store.schedules.list()) == len(before)
    await one.aclose()


async def test_migration() -> None:
    """U13: during a migration and its rollback, the side that accepts the tasks of a queue fires its schedules."""
    clock = ManualClock(START)
    old, new = MemoryBackend(clock=clock), MemoryBackend(clock=clock)
    backend = MigratingBackend(old, new)
    await put_all(backend)
    await clock.advance(60)
    await fire_all(backend)
    assert len(await old.schedules.list()) == len(NAMES)
    for change, side, other in ((start, new, old), (rollback, old, new)):
        await change(backend)
        await clock.advance(60)
        await fire_all(backend)
        await check(backend)
        assert len(await side.schedules.list()) == len(NAMES)
        assert await other.schedules.list() == ()
    assert await published(backend) == 3 * len(NAMES)
    await backend.aclose()


async def test_a_fire_before_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """U13: a process reads what is due; others fire it and change the shards; the process moves what is left."""
    clock = ManualClock(START)
    store = MemoryBackend(clock=clock)
    backend = ShardedBackend(store)
    await put_all(backend)
    await clock.advance(60)
    with monkeypatch.context() as patch:
        read = await store.schedules.due(100)

        async def late(limit: int) -> Due:
            del limit
            patch.undo()
            await fire_due(store.schedules, set())
            await backend.control.configure("q", QueueSettings(shards=3))
            return read

        patch.setattr(store.schedules, "due", late)
        await schedules_of(backend).due(100)
    await fire_all(backend)
    await check(backend)
    assert len(await store.schedules.list()) == len(NAMES)
    assert await published(backend) == len(NAMES)
    await backend.aclose()


async def test_interrupted_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """U13: if a move is interrupted between its steps, the schedule is fired once, and the next process moves it."""
    clock = ManualClock(START)
    store = MemoryBackend(clock=clock)
    backend = ShardedBackend(store)
    await put_all(backend)
    await backend.control.configure("q", QueueSettings(shards=3))
    await clock.advance(60)

    async def interrupted(*_: Any, **__: Any) -> bool:
        raise BackendUnavailable("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store.schedules, "delete", interrupted)
        with pytest.raises(BackendUnavailable):
            await schedules_of(backend).due(100)
    assert len(await store.schedules.list()) == len(NAMES) + 1
    await fire_all(backend)
    await check(backend)
    assert len(await store.schedules.list()) == len(NAMES)
    assert await published(backend) == len(NAMES)
    await backend.aclose()


async def test_a_closed_shard_fires_nothing() -> None:
    """U13: a plan for a schedule that is still in a closed shard is refused there."""
    clock = ManualClock(START)
    store = MemoryBackend(clock=clock)
    backend = ShardedBackend(store)
    await put_all(backend)
    (stored, *_) = await store.schedules.list()
    await backend.control.configure("q", QueueSettings(shards=3))
    task = Spec.decode(stored.spec).schedule.task.task("late", stored.name, START + 60, START + 60)
    fire = Fire(
        key="q",
        name=stored.name,
        version=stored.version,
        planned_for=stored.next_at,
        runs=(Run(START + 60, task),),
    )
    (done,) = await store.schedules.fire(fire)
    assert not any(answer.stored for answer in done.confirmations)
    assert await published(backend) == 0
    await backend.aclose()
