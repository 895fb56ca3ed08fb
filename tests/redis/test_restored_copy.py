"""A copy of the store that is an hour old is put back: what runs again, what does not, and what is lost."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest

from taskqueue_core.after import After, TaskRef
from taskqueue_core.capabilities import StoredSchedule
from taskqueue_core.clock import ManualClock
from taskqueue_core.consumer.expander import Expander
from taskqueue_core.consumer.firing import fire_due
from taskqueue_core.queue import Queue
from taskqueue_core.schedules import Every, Schedule, Spec, TaskTemplate
from taskqueue_core.tasks import Published, Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_core.workflows import WorkflowState, WorkflowStep
from taskqueue_redis import RedisBackend
from tests.redis.backends import opened
from tests.redis.carrying import carry
from tests.redis.conftest import MakeServer
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

START = 1_699_999_800.0
"""a multiple of ten minutes"""
HOUR = 3600.0
FIRST, LATER, FAR = "first", "later", "far"
"""queues: one whose tasks run before the copy is made, one whose tasks run afterwards, and one in another partition"""
ONCE = UniqueKey(key="once")
BRIEF = UniqueKey(key="brief", period=HOUR / 2)
BATCH = TaskRef(LATER, "batch")


async def _ran(backend: RedisBackend, *keys: str, carried: bool = True) -> Counter[str]:
    """Do what servers do, and run what is available, until there is nothing left to do; return what ran."""
    ran: Counter[str] = Counter()
    async with backend.subscribe(keys, "w") as consumer:
        while True:
            await fire_due(backend.schedules, set())
            await Expander(backend).drain()
            if carried:
                await carry(backend.dependencies)
            received = await consumer.receive(100, 0)
            if not received.deliveries and not received.again:
                return ran
            ran.update(delivery.task.id for delivery in received.deliveries)
            await consumer.ack(*received.deliveries)


async def _fill(backend: RedisBackend) -> None:
    """Publish tasks of each kind, and put schedules, of which the first instants are ten minutes ahead."""
    await backend.publisher.publish(
        Task(key=FIRST, id="brief", unique=BRIEF),
        Task(key=FIRST, id="ended"),
        Task(key=LATER, id="unique", unique=ONCE),
        Task(key=LATER, id="scheduled", not_before=START + HOUR / 2),
        Task(key=FAR, id="parent"),
        Task(key=LATER, id="child", after=After(tasks=(TaskRef(FAR, "parent"),))),
        Task(key=FAR, id="informed", after=After(tasks=(TaskRef(FIRST, "ended"),))),
        Task(key=LATER, id="batch", batch=BATCH),
        Task(key=FIRST, id="early", batch=BATCH),
        Task(key=FAR, id="member", batch=BATCH),
        Task(key=LATER, id="callback", after=After(tasks=(BATCH,))),
    )
    steps = [
        WorkflowStep.of("a", FIRST),
        WorkflowStep.of("b", LATER, after=("a",)),
        WorkflowStep.of("c", FAR, after=("b",)),
    ]
    await Queue(backend).workflows.put(steps, id="w")
    for catch_up in ("all", "last"):
        schedule = Schedule(
            catch_up, Every(600), TaskTemplate(key=LATER), catch_up, late=2 * HOUR, overlap="allow"
        )
        spec = Spec(schedule=schedule).encode()
        stored = StoredSchedule(name=catch_up, key=LATER, spec=spec, next_at=START + 600)
        await backend.schedules.put(stored)


async def _put_back(server: RedisServer, copy: Path) -> None:
    await asyncio.to_thread(server.kill)
    shutil.rmtree(server.folder / "appendonlydir")
    shutil.copytree(copy, server.folder / "appendonlydir")
    await asyncio.to_thread(server.start)


@pytest.mark.long
async def test_an_hour_old(make_server: MakeServer, redis_prefix: str, tmp_path: Path) -> None:
    """U12, U13, U15, U16: what had ended at the copy does not run again, and all else runs again, once.

    That concerns tasks, instants of schedules, children, members of batches and the steps of workflows. What came after
    the copy is lost.
    """
    clock, copy = ManualClock(START), tmp_path / "copy"
    with make_server(config={"appendfsync": "always"}) as server:
        async with opened(server.url, redis_prefix, clock=clock, partitions=4) as backend:
            await _fill(backend)
            assert not await _ran(
                backend, "none"
            )  # but the steps are stored, and lines are carried
            before = await _ran(backend, FIRST, carried=False)
            assert before == Counter(["brief", "ended", "w.a", "early"])
            assert await backend.dependencies.close(BATCH)
            assert await backend.dependencies.lines(
                9
            )  # those of what ended, which the copy has, too
            shutil.copytree(server.folder / "appendonlydir", copy)
            await clock.advance(HOUR)
            usual = await _ran(backend, FIRST, LATER, FAR)
            tasks = {"unique", "scheduled", "parent", "child", "informed", "w.b", "w.c"}
            tasks |= {"member", "callback"}
            instants = Counter(name.partition(".")[0] for name in usual.keys() - tasks)
            assert (instants, set(usual.values())) == ({"all": 6, "last": 1}, {1})
            await backend.publisher.publish(Task(key=LATER, id="new", unique=ONCE))
        await _put_back(server, copy)
        async with opened(server.url, redis_prefix, clock=clock, partitions=4) as backend:
            assert await backend.control.statuses(LATER, "new") == (None,)
            kept, free = await backend.publisher.publish(
                Task(key=LATER, id="x", unique=ONCE), Task(key=FIRST, id="free", unique=BRIEF)
            )
            assert (kept.status, kept.existing_id) == (Published.DUPLICATE, "unique")
            assert free.status is Published.ACCEPTED  # its period has ended since the copy
            assert await _ran(backend, FIRST, LATER, FAR) == usual + Counter(["free"])
            (free,) = await backend.publisher.publish(Task(key=LATER, id="x", unique=ONCE))
            assert free.status is Published.ACCEPTED
            status = await Queue(backend).workflows.get("w")
            assert status is not None
            assert status.state is WorkflowState.ENDED
        recounted(server, redis_prefix)
