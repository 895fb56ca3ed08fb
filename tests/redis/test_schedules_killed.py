"""Three real servers fire the same schedules of one Redis, while servers are killed and connections are cut."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings, StoredSchedule
from taskqueue_core.schedules import Every, Schedule, Spec, TaskTemplate
from taskqueue_redis import RedisBackend
from tests.redis.backends import opened, until
from tests.redis.servers import RedisServer
from tests.redis.serving import Serving, serving

SERVERS, SCHEDULES, SECONDS = 3, 30, 6
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 20))]


class Fleet:
    """Servers that are killed and started again."""

    def __init__(self, folder: Path, variables: dict[str, Any]) -> None:
        self._folder = folder
        self._variables = variables
        self._stacks: dict[int, AsyncExitStack] = {}
        self._servers: dict[int, Serving] = {}

    async def start(self, number: int) -> None:
        """Start a server."""
        folder = self._folder / str(number)
        folder.mkdir(exist_ok=True)
        stack = self._stacks[number] = AsyncExitStack()
        self._servers[number] = await stack.enter_async_context(serving(folder, **self._variables))

    async def kill(self, number: int) -> None:
        """Kill a server, and start another one in its place."""
        self._servers[number].process.kill()
        await self._stacks[number].aclose()
        await self.start(number)

    async def close(self) -> None:
        """Kill all servers."""
        for stack in self._stacks.values():
            await stack.aclose()


@asynccontextmanager
async def consuming(backend: RedisBackend, counts: Counter[str]) -> AsyncIterator[None]:
    """Ack all tasks, and count them by id."""

    async def consume() -> None:
        async with backend.subscribe(["q0", "q1"], "c") as subscription:
            while True:
                received = await subscription.receive(100, None)
                if received.deliveries:
                    counts.update(delivery.task.id for delivery in received.deliveries)
                    await subscription.ack(*received.deliveries)

    consumer = asyncio.create_task(consume())
    try:
        yield
    finally:
        consumer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await consumer


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
async def test_servers_are_killed(
    redis_server: RedisServer, redis_prefix: str, tmp_path: Path, seed: int
) -> None:
    """U13, fault A6: while servers are killed, answers are lost and a queue is full, each instant is fired once."""
    chance, counts = random.Random(seed), Counter[str]()
    variables = {
        "backend": "redis",
        "redis_url": redis_server.url,
        "redis_prefix": redis_prefix,
    }
    fleet = Fleet(tmp_path, variables)
    async with opened(redis_server.url, redis_prefix) as backend:
        await backend.control.configure("q0", QueueSettings(capacity=2, dedupe_window=0.0))
        await backend.control.configure("q1", QueueSettings(dedupe_window=0.0))
        try:
            await asyncio.gather(*(fleet.start(number) for number in range(SERVERS)))
            start = int(backend.now()) + 1
            expected = await _put_all(backend, start)
            async with consuming(backend, counts):
                while backend.now() < start + SECONDS:
                    await fleet.kill(chance.randrange(SERVERS))
                    redis_server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await until(lambda: counts.total() >= expected, "all instants are fired")
                ended = [await backend.schedules.get(f"s{n}") for n in range(SCHEDULES)]
                assert all(one is not None and one.next_at is None for one in ended)
        finally:
            await fleet.close()
    assert counts.total() == expected
    assert set(counts.values()) == {1}


async def _put_all(backend: RedisBackend, start: int) -> int:
    """Put schedules whose instants are from ``start`` on for `SECONDS`; return the number of the instants."""
    number = 0
    for n in range(SCHEDULES):
        every, key = 1 + n % 3, f"q{n % 2}"
        schedule = Schedule(
            f"s{n}",
            Every(every, since=datetime.fromtimestamp(start, UTC)),
            TaskTemplate(key=key),
            catch_up="all",
            overlap="allow",
            ends=datetime.fromtimestamp(start + SECONDS, UTC),
        )
        spec = Spec(schedule=schedule).encode()
        stored = StoredSchedule(key=key, name=schedule.name, spec=spec, next_at=float(start))
        await backend.schedules.put(stored)
        number += len(range(0, SECONDS, every))
    return number
