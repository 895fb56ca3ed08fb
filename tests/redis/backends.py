"""Helpers for tests of the Redis backend on a real server: backends with a short lease, and waiting for conditions."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from taskqueue_core.backend import Subscription
from taskqueue_core.clock import Clock
from taskqueue_core.tasks import Delivery, Published, Task
from taskqueue_redis import RedisBackend
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

KEY = "work"
LEASE = 1.0
"""the shortest lease that the settings allow, in seconds"""
HOUSEKEEPING = 0.25
PATIENCE = 30.0
"""seconds after which a condition counts as failed: long enough for a busy machine, but not endless"""


@asynccontextmanager
async def opened(
    url: str, prefix: str, *, clock: Clock | None = None, **values: Any
) -> AsyncIterator[RedisBackend]:
    """Open a backend, as a separate process would, and close it afterwards."""
    values = {"lease": LEASE, "housekeeping": HOUSEKEEPING, "prefix": prefix} | values
    backend = RedisBackend(clock=clock, settings=settings_for(url, **values))
    try:
        yield backend
    finally:
        await backend.aclose()


@asynccontextmanager
async def housekept(backend: RedisBackend) -> AsyncIterator[None]:
    """Run maintenance passes in the background, as a server does, until the block ends."""

    async def passes() -> None:
        while True:
            await backend.control.maintain()
            await asyncio.sleep(HOUSEKEEPING)

    task = asyncio.create_task(passes())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def fall_silent(server: RedisServer, backend: RedisBackend, *tokens: str) -> None:
    """Make consumers look as if the store had received no heartbeat from them for longer than a lease."""
    await backend._context.heartbeat.aclose()
    # Without this pass, the next one would see a gap in maintenance and grant each consumer another lease.
    await backend.control.maintain()
    for name in backend._context.scripts.partitions.names:
        for token in tokens:
            server.call("ZADD", f"{name}:alive", "XX", 1, token)
        server.call("HSET", f"{name}:meta", "armed", 1)


@contextlib.contextmanager
def counted_wakeups() -> Iterator[Counter[str]]:
    """Count how often the running event loop wakes up, as ``wakeups``. Load of the machine does not add any."""
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    found, select = Counter[str](), selector.select

    def counting(timeout: float | None = None) -> Any:
        found["wakeups"] += 1
        return select(timeout)

    selector.select = counting
    try:
        yield found
    finally:
        del selector.select


async def publish(backend: RedisBackend, *ids: str, key: str = KEY, **fields: Any) -> None:
    """Publish tasks with these ids and assert that each of them is accepted."""
    for start in range(0, len(ids), 1000):
        tasks = [Task(key=key, id=name, **fields) for name in ids[start : start + 1000]]
        told = await backend.publisher.publish(*tasks)
        assert all(answer.status is Published.ACCEPTED for answer in told)


async def take(
    subscription: Subscription, number: int, *, within: float = PATIENCE, limit: int | None = None
) -> list[Delivery]:
    """Receive exactly ``number`` deliveries, in as many receives as needed."""
    found: list[Delivery] = []
    async with asyncio.timeout(within):
        while len(found) < number:
            received = await subscription.receive(limit or min(1000, number - len(found)), None)
            found += received.deliveries
    assert len(found) == number
    return found


async def until(
    holds: Callable[[], bool | Awaitable[bool]], what: str = "it holds", *, within: float = PATIENCE
) -> None:
    """Wait until a condition holds; fail with ``what`` if it does not hold in time."""
    try:
        async with asyncio.timeout(within):
            while True:
                answer = holds()
                if answer if isinstance(answer, bool) else await answer:
                    return
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {within:g} s: {what}") from None


def stream(prefix: str, lane: str = "s5", key: str = KEY) -> str:
    """Return the name of a Redis stream of a queue: "s5" has fresh tasks of priority 5, "r5" returned ones."""
    return f"{{{prefix}:0}}:q:{key}/{lane}"


def keys_of(server: RedisServer, prefix: str) -> set[str]:
    """Return the names of all Redis keys of a backend, in all of its partitions."""
    found: Iterable[bytes] = server.call("KEYS", f"{{{prefix}:*")
    return {name.decode() for name in found}
