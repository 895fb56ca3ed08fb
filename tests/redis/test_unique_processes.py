"""Unique keys under faults of publishers: races of processes, SIGKILL at any point, and a clock that is set back."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter

from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Ledger, Published, State, Task
from taskqueue_core.uniqueness import Debounce, UniqueKey
from tests.redis.backends import PATIENCE, opened, take
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

KEYS = 50
PUBLISH = f"""
import asyncio, itertools, sys

from pydantic import SecretStr
from taskqueue_core.tasks import Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_redis import RedisBackend, RedisSettings


async def main(url, prefix, name):
    backend = RedisBackend(settings=RedisSettings(url=SecretStr(url), prefix=prefix, _env_file=None))
    for turn in itertools.count():
        how = "replace" if turn % 2 else "keep"
        tasks = [
            Task.of("work", f"{{name}}-{{turn}}", id=f"{{name}}-{{turn}}-{{n}}",
                    unique=UniqueKey(key=f"k{{n}}", on_conflict=how))
            for n in range({KEYS})
        ]
        await backend.publisher.publish(*tasks)
        print(turn, flush=True)


asyncio.run(main(*sys.argv[1:]))
"""


async def _turns(process: Process, number: int) -> None:
    """Wait until a publisher has finished so many more batches."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        for _ in range(number):
            assert await process.stdout.readline()


async def test_publishers_are_killed(redis_server: RedisServer, redis_prefix: str) -> None:
    """U12, fault A1: publishers race with the same keys and are killed at any point; one task per key is stored."""
    words = (sys.executable, "-c", PUBLISH, redis_server.url, redis_prefix)
    processes = [
        await asyncio.create_subprocess_exec(*words, f"p{n}", stdout=PIPE) for n in range(3)
    ]
    try:
        for process in processes:
            await _turns(process, 4)
        for killed in processes[:2]:
            killed.send_signal(signal.SIGKILL)
        await _turns(processes[2], 8)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
    async with opened(redis_server.url, redis_prefix) as backend:
        assert await backend.control.ledger("work") == Ledger(published=KEYS, waiting=KEYS)
        recounted(redis_server, redis_prefix)
        async with backend.subscribe(["work"], "w") as consumer:
            taken = await take(consumer, KEYS)
            assert Counter(each.task.unique.key for each in taken if each.task.unique) == Counter(
                {f"k{n}": 1 for n in range(KEYS)}
            )
            await consumer.ack(*taken)
        # The last batch of a killed publisher, sent again by its successor: nothing is stored a second time.
        before = await backend.control.ledger("work")
        again = [
            Task.of("work", each.task.value(), id=each.task.id, unique=each.task.unique)
            for each in taken
        ]
        statuses = {answer.status for answer in await backend.publisher.publish(*again)}
        assert statuses <= {Published.DUPLICATE, Published.CONFLICT}
        assert await backend.control.ledger("work") == before


async def test_the_clock_is_set_back(redis_server: RedisServer, redis_prefix: str) -> None:
    """U12, U29: after a step of the clock back, keys and periods are held, and a debounce waits as long as it says."""
    clock = ManualClock(start=1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        key = UniqueKey(key="k", period=60.0)
        wait = UniqueKey(key="d", on_conflict="replace", debounce=Debounce(10, 30))
        await backend.publisher.publish(
            Task(key="work", id="a", unique=key), Task(key="work", id="b", unique=wait)
        )
        async with backend.subscribe(["work"], "w") as consumer:
            await consumer.ack(*(await consumer.receive(1, 0)).deliveries)
    back = ManualClock(start=1_700_000_000.0 - 3600)
    async with opened(redis_server.url, redis_prefix, clock=back) as backend:
        kept, replaced = await backend.publisher.publish(
            Task(key="work", id="a2", unique=key), Task(key="work", id="b2", unique=wait)
        )
        assert (kept.status, kept.existing_id) == (Published.DUPLICATE, "a")
        assert (replaced.status, replaced.existing_id) == (Published.REPLACED, "b")
        (status,) = await backend.control.statuses("work", "b")
        assert status is not None
        assert status.state is State.SCHEDULED
        assert status.due_at == back.now() + 10
        recounted(redis_server, redis_prefix)
