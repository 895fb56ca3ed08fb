"""Tasks that wait for others, under faults: carriers that are killed, and lines, notes and waits that are lost."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from taskqueue_core.after import UNKNOWN_PARENT
from taskqueue_core.capabilities import QueueSettings, StoredSchedule
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import State, Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, take
from tests.redis.carrying import carry
from tests.redis.killed_carrier import PARTITIONS
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer
from tests.redis.test_after import FAR, after, one, publish, state

_ROOT = Path(__file__).parents[2]
_HOUR = 3600.0


@pytest.fixture
def clock() -> ManualClock:
    """The clock of the store."""
    return ManualClock(1_700_000_000.0)


@pytest.fixture
async def backend(
    redis_server: RedisServer, redis_prefix: str, clock: ManualClock
) -> AsyncIterator[RedisBackend]:
    """A backend with four partitions; `KEY` and `FAR` are in two of them."""
    async with opened(
        redis_server.url, redis_prefix, partitions=PARTITIONS, clock=clock
    ) as backend:
        yield backend


def partition_of(backend: RedisBackend, key: str) -> str:
    """Return the name of the partition of a queue."""
    return backend._context.scripts.partitions.of(key)


async def check(backend: RedisBackend, server: RedisServer, key: str = KEY) -> None:
    """Run maintenance with its checks, and carry lines."""
    server.call("HDEL", f"{partition_of(backend, key)}:meta", "checked")
    await backend.control.maintain()
    await carry(backend.dependencies)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("at", "step"),
    [
        *(("registration", step) for step in ("register", "confirm")),
        *(("end", step) for step in ("release", "confirm")),
        ("ended", "release"),
    ],
)
async def test_a_carrier_is_killed(
    redis_server: RedisServer, redis_prefix: str, at: str, step: str, when: str
) -> None:
    """U16, fault A1: a process that carries lines is killed at any step; the child is released exactly once."""
    async with opened(redis_server.url, redis_prefix, partitions=PARTITIONS) as backend:
        await publish(backend, Task(key=FAR, id="p"))
        await publish(backend, Task(key=KEY, id="c", after=after("p", key=FAR)))
        if at == "end":
            await carry(backend.dependencies)
        if at != "registration":
            async with backend.subscribe([FAR], "w") as consumer:
                await consumer.ack(await one(consumer, "p"))
        command = ["-m", "tests.redis.killed_carrier", redis_server.url, redis_prefix, step, when]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=_ROOT)
        assert await process.wait() == -signal.SIGKILL
        await carry(backend.dependencies)
        if at == "registration":
            assert await state(backend, "c") is State.BLOCKED
            async with backend.subscribe([FAR], "w") as consumer:
                await consumer.ack(await one(consumer, "p"))
            await carry(backend.dependencies)
        async with backend.subscribe([KEY], "w") as consumer:
            await consumer.ack(*await take(consumer, 1))
        ledger = await backend.control.ledger(KEY)
        assert (ledger.published, ledger.done) == (1, 1)
        assert not await backend.dependencies.lines(10)
        for partition in range(PARTITIONS):
            recounted(redis_server, redis_prefix, partition)


async def test_a_full_queue_at_the_release(backend: RedisBackend) -> None:
    """U16: the queue of the child is full and accepts nothing when its parent ends; the child is released."""
    await publish(backend, Task(key=FAR, id="p"))
    await publish(backend, Task(key=KEY, id="c", after=after("p", key=FAR)), Task(key=KEY, id="d"))
    await carry(backend.dependencies)
    settings = QueueSettings(capacity=1, intake_paused=True)
    await backend.control.configure(KEY, settings)
    async with backend.subscribe([FAR], "w") as consumer:
        await consumer.ack(await one(consumer, "p"))
    await carry(backend.dependencies)
    assert await state(backend, "c") is State.WAITING


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("lost", ["children", "outbox", "lines"])
@pytest.mark.parametrize("ended", [False, True])
async def test_a_child_whose_parent_has_lost_it(
    backend: RedisBackend,
    redis_server: RedisServer,
    clock: ManualClock,
    lost: str,
    *,
    far: bool,
    ended: bool,
) -> None:
    """U16: notes and lines that another program deletes, or a failover loses, are written again by maintenance."""
    key = FAR if far else KEY
    await backend.control.configure(key, QueueSettings(dedupe_window=2 * _HOUR))
    await publish(backend, Task(key=key, id="p"), Task(key=KEY, id="c", after=after("p", key=key)))
    await carry(backend.dependencies)
    if not ended:
        redis_server.call("DEL", f"{partition_of(backend, key)}:{lost}")
        await clock.advance(_HOUR)
        await check(backend, redis_server)
    async with backend.subscribe([key], "w") as consumer:
        await consumer.ack(await one(consumer, "p"), results=[b"1"])
    if ended:
        redis_server.call("DEL", f"{partition_of(backend, key)}:{lost}")
        await clock.advance(_HOUR)
        await check(backend, redis_server)
    await carry(backend.dependencies)
    assert await state(backend, "c") is State.WAITING


async def test_a_parent_that_is_lost(
    backend: RedisBackend, redis_server: RedisServer, clock: ManualClock
) -> None:
    """U16: a child whose parent was deleted by another program is cancelled, and does not wait for ever."""
    for key in (KEY, FAR):
        await publish(backend, Task(key=key, id="p"))
        await publish(backend, Task(key=KEY, id=f"c-{key}", after=after("p", key=key)))
        await carry(backend.dependencies)
        redis_server.call("HDEL", f"{partition_of(backend, key)}:q:{key}/t", "p")
        redis_server.call("DEL", f"{partition_of(backend, key)}:q:{key}/s5")
    await clock.advance(_HOUR)
    await check(backend, redis_server)
    for key in (KEY, FAR):
        (status,) = await backend.control.statuses(KEY, f"c-{key}")
        assert status is not None
        assert (status.state, status.error) == (State.CANCELLED, UNKNOWN_PARENT), key


@pytest.mark.parametrize("value", [None, "x"])
async def test_a_damaged_wait(
    backend: RedisBackend, redis_server: RedisServer, value: str | None
) -> None:
    """U16: what a blocked task knows of its parents is lost or damaged; it looks at them again, and is released."""
    await publish(backend, Task(key=FAR, id="a"), Task(key=FAR, id="b"))
    await publish(backend, Task(key=KEY, id="c", after=after("a", "b", key=FAR)))
    await carry(backend.dependencies)
    async with backend.subscribe([FAR], "w") as consumer:
        await consumer.ack(await one(consumer, "a"))
        await carry(backend.dependencies)
        name = f"{partition_of(backend, KEY)}:q:{KEY}/w:c"
        redis_server.call(*(("DEL", name) if value is None else ("HSET", name, "state", value)))
        await check(backend, redis_server)
        assert await state(backend, "c") is State.BLOCKED
        await consumer.ack(await one(consumer, "b"))
    await carry(backend.dependencies)
    assert await state(backend, "c") is State.WAITING
    assert (await backend.health()).details["anomalies"]


async def test_a_damaged_index_of_held_tasks(
    backend: RedisBackend, redis_server: RedisServer
) -> None:
    """U16: the index of tasks that dead letters hold loses one, or gets one that is not blocked; checks mend it."""
    await publish(backend, Task(key=KEY, id="p"), Task(key=KEY, id="c", after=after("p")))
    async with backend.subscribe([KEY], "w") as consumer:
        await consumer.dead_letter(await one(consumer, "p"), "bad")
    index = f"{partition_of(backend, KEY)}:q:{KEY}/blocked_on_dead"
    for words in (("DEL", index), ("ZADD", index, 0, "p")):
        redis_server.call(*words)
        assert (await backend.control.stats(KEY)).blocked_on_dead != 1
        await check(backend, redis_server)
        assert (await backend.control.stats(KEY)).blocked_on_dead == 1
    assert (await backend.health()).details["anomalies"]


@pytest.mark.parametrize("kind", ["register", "end"])
async def test_a_damaged_line(
    backend: RedisBackend, redis_server: RedisServer, clock: ManualClock, kind: str
) -> None:
    """U16: a line that cannot be read is reported; maintenance writes what replaces it."""
    await backend.control.configure(FAR, QueueSettings(dedupe_window=2 * _HOUR))
    await publish(backend, Task(key=FAR, id="p"))
    await publish(backend, Task(key=KEY, id="c", after=after("p", key=FAR)))
    async with backend.subscribe([FAR], "w") as consumer:
        if kind == "end":
            await carry(backend.dependencies)
            await consumer.ack(await one(consumer, "p"))
        key = FAR if kind == "end" else KEY
        line = f"{kind} {FAR}/p {KEY}/c"
        assert redis_server.call("HSET", f"{partition_of(backend, key)}:lines", line, "x") == 0
        assert not await backend.dependencies.lines(10)
        await clock.advance(_HOUR)
        await check(backend, redis_server)
        if kind == "register":
            await consumer.ack(await one(consumer, "p"))
    await carry(backend.dependencies)
    assert await state(backend, "c") is State.WAITING
    assert (await backend.health()).details["anomalies"]


async def test_a_store_of_an_earlier_version(redis_server: RedisServer, redis_prefix: str) -> None:
    """U12, U13, U16: a server that does not know blocked tasks, lines, schedules or unique keys refuses their store."""
    async with opened(redis_server.url, redis_prefix) as backend:
        unique = UniqueKey(key="u")
        await publish(backend, Task(key=KEY, id="c", after=after("p", key=FAR), unique=unique))
        await backend.schedules.put(StoredSchedule(name="s", key=KEY, spec=b"{}", next_at=None))
        meta = f"{partition_of(backend, KEY)}:meta"
    assert redis_server.call("HGET", meta, "layout") == b"8"
    # This server stands for an earlier one, which meets a later store, and meets the stores of earlier ones.
    for layout in ("6", "7", "9"):
        redis_server.call("HSET", meta, "layout", layout)
        async with opened(redis_server.url, redis_prefix) as backend:
            health = await backend.health()
        assert not health.ok
        said = str(health.details["error"])
        assert f"has layout {layout}, but this version writes 8: use the version that wrote" in said


async def test_replaced_parents(backend: RedisBackend) -> None:
    """U12, U16: an id whose publish replaced another task is no parent, also in another partition."""
    unique = UniqueKey(key="u", on_conflict="replace")
    await publish(backend, Task(key=FAR, id="first", unique=unique))
    await backend.publisher.publish(Task(key=FAR, id="second", unique=unique))
    await publish(backend, Task(key=KEY, id="c", after=after("second", key=FAR)))
    await carry(backend.dependencies)
    (status,) = await backend.control.statuses(KEY, "c")
    assert status is not None
    assert (status.state, status.error) == (State.CANCELLED, UNKNOWN_PARENT)
