"""Unique keys in Redis that another program has deleted or changed: maintenance repairs them from the tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Confirmation, Published, Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, PATIENCE, opened, take
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer
from tests.redis.test_damage import name_of


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend of the shared server."""
    async with opened(redis_server.url, redis_prefix) as backend:
        yield backend


def _unique(task_id: str, key: str, **fields: object) -> Task:
    unique = UniqueKey(key=key, **fields)  # type: ignore[arg-type]
    return Task.of(KEY, task_id, id=task_id, unique=unique)


async def _offer(backend: RedisBackend, task: Task) -> Confirmation:
    (answer,) = await backend.publisher.publish(task)
    return answer


async def _fill(backend: RedisBackend) -> None:
    """Leave tasks with unique keys that are waiting, in flight, scheduled and dead, and one without a key."""
    async with backend.subscribe([KEY], "before") as consumer:
        await backend.publisher.publish(_unique("dead", "d"))
        (dead,) = await take(consumer, 1)
        await consumer.dead_letter(dead, "broken")
    later = Task.of(KEY, id="later", not_before=backend.now() + 3600, unique=UniqueKey(key="s"))
    await backend.publisher.publish(
        later,
        _unique("waits", "w"),
        _unique("period", "p", period=3600.0),
        Task.of(KEY, id="plain"),
    )


async def _repaired(backend: RedisBackend, server: RedisServer, keys: int, members: int) -> None:
    """Run maintenance until all tasks have their keys again."""
    async with asyncio.timeout(PATIENCE):
        while True:
            server.call("HDEL", f"{name_of(backend).partition(':q:')[0]}:meta", "checked")
            await backend.control.maintain()
            told = server.call("HLEN", f"{name_of(backend)}/K")
            if told == keys and server.call("ZCARD", f"{name_of(backend)}/U") == members:
                return


@pytest.mark.parametrize("lost", ["K", "U", "KU"])
async def test_keys_are_lost(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, lost: str
) -> None:
    """U12, U29: unique keys that were deleted are found again in the tasks, and hold."""
    await _fill(backend)
    for kind in lost:
        redis_server.call("DEL", f"{name_of(backend)}/{kind}")
    await _repaired(backend, redis_server, 4, 4 if "K" in lost else 3)
    for key, holder in (("s", "later"), ("w", "waits"), ("p", "period")):
        answer = await _offer(backend, _unique("other", key))
        assert (answer.status, answer.existing_id) == (Published.DUPLICATE, holder)
    assert (await _offer(backend, _unique("other", "d"))).status is Published.ACCEPTED
    assert await backend.dead_letters.redrive(KEY) == 1
    async with backend.subscribe([KEY], "after") as consumer:
        (answer,) = await backend.publisher.publish(_unique("more", "w", on_conflict="replace"))
        assert answer.status is Published.REPLACED
        taken = {each.task.id: each.task.value() for each in await take(consumer, 5)}
    assert taken == {
        "waits": "more",
        "period": "period",
        "plain": None,
        "dead": "dead",
        "other": "other",
    }
    recounted(redis_server, redis_prefix)
    assert (await backend.health()).details["anomalies"]


async def test_foreign_members(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U12, U29: members of another program hold nothing, and are removed by maintenance."""
    await _fill(backend)
    name = name_of(backend)
    redis_server.call(
        "ZADD", f"{name}/U", 0, "x waits", 0, "x plain", 0, "x", 0, "y nobody", 0, "w nobody"
    )
    redis_server.call("HSET", f"{name}/K", "plain", "?", "nobody", "0:0:0:y")
    assert (await _offer(backend, _unique("x1", "x"))).status is Published.ACCEPTED
    assert (await _offer(backend, _unique("y1", "y"))).status is Published.ACCEPTED
    assert (await _offer(backend, _unique("w1", "w"))).existing_id == "waits"
    redis_server.call("HDEL", f"{name}/K", "plain")
    await _repaired(backend, redis_server, 6, 6)
    recounted(redis_server, redis_prefix)


async def test_a_scripts_answer_is_lost(redis_server: RedisServer, redis_prefix: str) -> None:
    """U12, law 7: a publish that replaced is repeated after a lost answer, also after the end of the task."""
    clock = ManualClock(start=1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        await _offer(backend, _unique("t1", "k"))
        new = _unique("t2", "k", on_conflict="replace")
        for _ in range(2):
            answer = await _offer(backend, new)
            assert (answer.status, answer.existing_id) == (Published.REPLACED, "t1")
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.ack(*await take(consumer, 1))
        assert (await _offer(backend, new)).status is Published.REPLACED
        await clock.advance(301)
        assert (await _offer(backend, new)).status is Published.ACCEPTED
        recounted(redis_server, redis_prefix)


async def test_the_index_does_not_grow(redis_server: RedisServer, redis_prefix: str) -> None:
    """U12: after the records of its tasks, no key is left; a key has a bounded number of members."""
    clock = ManualClock(start=1_700_000_000.0)
    async with opened(redis_server.url, redis_prefix, clock=clock) as backend:
        name = name_of(backend)
        async with backend.subscribe([KEY], "c") as consumer:
            for n in range(600):
                await _offer(backend, _unique(f"t{n}", "same"))
                (delivery,) = await take(consumer, 1)
                await consumer.dead_letter(delivery, "bad")
            assert redis_server.call("ZCARD", f"{name}/U") == 1
            assert redis_server.call("HLEN", f"{name}/K") == 600
            assert await backend.dead_letters.redrive(KEY) == 600
            assert redis_server.call("ZCARD", f"{name}/U") == 100
            assert (await _offer(backend, _unique("more", "same"))).status is Published.DUPLICATE
            for _ in range(6):
                await consumer.ack(*await take(consumer, 100))
            assert (await _offer(backend, _unique("more", "same"))).status is Published.ACCEPTED
            assert redis_server.call("ZCARD", f"{name}/U") == 1
            await consumer.ack(*await take(consumer, 1))
        for _ in range(3):
            await clock.advance(400)
            await backend.control.maintain()
        assert not redis_server.call("EXISTS", f"{name}/K", f"{name}/U", f"{name}/t")
