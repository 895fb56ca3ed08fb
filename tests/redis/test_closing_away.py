"""Closing a backend while its store is unavailable: closing ends soon and ends all calls."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import Endpoint, Seen
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed, SubscriptionClosed
from taskqueue_core.tasks import Received, Task
from taskqueue_redis import RedisBackend
from taskqueue_redis import backend as module
from taskqueue_redis.connection.failures import NotReached
from tests.redis.backends import KEY, PATIENCE, opened, publish, take, until
from tests.redis.conftest import MakeServer
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

LONG = 2 * PATIENCE
"""seconds for which a call would continue if closing did not end it"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time for which a closing backend tries an unavailable store from 1 s to 0.3 s."""
    monkeypatch.setattr(module, "_OUTAGE_SECONDS", 0.3)


async def begun(server: RedisServer, prefix: str, **values: Any) -> RedisBackend:
    """Return a backend with an endpoint that has free slots."""
    values = {"lease": 15.0, "operation_timeout": LONG, "prefix": prefix} | values
    backend = RedisBackend(settings=settings_for(server.url, **values))
    await backend.slots.register(Endpoint(model="m", server="s", url="http://s", slots=4))
    await backend.slots.reconcile("m", "s", Seen(active=0), settled=0)
    return backend


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Assert that the block leaves no asyncio task and no thread behind."""
    before, threads = asyncio.all_tasks(), set(threading.enumerate())
    yield
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    left = set(threading.enumerate()) - threads
    assert not [thread.name for thread in left if "taskqueue" in thread.name]


async def closed(backend: RedisBackend) -> None:
    """Close the backend within the time limit."""
    async with asyncio.timeout(PATIENCE):
        await backend.aclose()


async def ended(*calls: asyncio.Task[Any]) -> list[Any]:
    """Return the results or errors of calls, which must end within the time limit."""
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("away", [0.0, 0.5])
async def test_calls_in_flight(make_server: MakeServer, redis_prefix: str, away: float) -> None:
    """A13, faults B1 and E4: calls in flight when the store is killed end soon after the backend is closed."""
    server = make_server().start()
    async with nothing_left():
        backend = await begun(server, redis_prefix)
        await publish(backend, *"abc")
        consumer, *others = (backend.subscribe([KEY, f"k{n}"], f"c{n}") for n in range(4))
        (held,) = await take(consumer, 1)
        waiting = [asyncio.create_task(each.receive(1, None)) for each in others[1:]]
        await take(others[0], 2)
        await until(lambda: all(each.asleep for each in others[1:]), "all wait")
        server.kill()
        calls = [
            asyncio.create_task(call)
            for call in (
                backend.slots.acquire("m", "h", ttl=30),
                consumer.ack(held),
                backend.publisher.publish(Task.of(KEY, id="d")),
                backend.control.ledger(KEY),
            )
        ]
        receive = asyncio.create_task(consumer.receive(1, None))
        left = asyncio.create_task(backend.slots.acquire("m", "h", ttl=30))
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.sleep(away)
        await closed(backend)
        assert {type(told) for told in await ended(*calls)} <= {
            BackendUnavailable,
            PublishUnconfirmed,
        }
        # A receive that was querying the store when it was killed gets an error.
        for told in await ended(receive, *waiting):
            assert told == Received() or isinstance(told, BackendUnavailable)
        with contextlib.suppress(asyncio.CancelledError):
            await left
        assert left.cancelled()
        await refused(consumer)
    server.start()
    async with opened(server.url, redis_prefix) as again:
        assert (await again.control.ledger(KEY)).published >= 3


async def refused(consumer: Subscription) -> None:
    """Assert that a receive raises `SubscriptionClosed`."""
    with pytest.raises(SubscriptionClosed):
        await consumer.receive(1, 0)


async def test_a_sign_of_life_in_flight(make_server: MakeServer, redis_prefix: str) -> None:
    """A13, fault B1: a heartbeat that waits for the store does not delay closing."""
    server = make_server().start()
    async with nothing_left():
        backend = await begun(server, redis_prefix, lease=1.0)
        consumer = backend.subscribe([KEY], "c")
        await consumer.receive(1, 0)
        server.freeze()
        await asyncio.sleep(0.5)  # three heartbeats are sent per second
        server.kill()
        await closed(backend)


async def test_a_store_that_is_silent(make_server: MakeServer, redis_prefix: str) -> None:
    """A13, fault B10: closing waits for a frozen store only once, and no longer than for any answer."""
    server = make_server().start()
    async with nothing_left():
        backend = await begun(server, redis_prefix, answer_timeout=0.4)
        for number in range(3):
            await backend.subscribe([f"k{number}"], "c").receive(1, 0)
        server.freeze()
        call = asyncio.create_task(backend.slots.acquire("m", "h", ttl=30))
        await asyncio.sleep(0)
        await closed(backend)
        (told,) = await ended(call)
        assert isinstance(told, BackendUnavailable)
        server.thaw()


async def test_a_store_that_is_back(
    make_server: MakeServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13, fault B1: if the store is available again before closing gives up, all deliveries are released."""
    monkeypatch.setattr(module, "_OUTAGE_SECONDS", 30.0)
    server = make_server().start()
    backend = await begun(server, redis_prefix, lease=60.0)
    await publish(backend, "a")
    await take(backend.subscribe([KEY], "c"), 1)
    server.kill()
    closing = asyncio.create_task(backend.aclose())
    await asyncio.sleep(0.05)
    await asyncio.to_thread(server.start)
    await closing
    async with opened(server.url, redis_prefix) as other:
        assert (await other.control.ledger(KEY)).waiting == 1


async def test_a_part_that_is_away(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13, fault E5: a receive that finds a partition unavailable while the backend closes does not retry for ever."""
    async with nothing_left():
        backend = await begun(redis_server, redis_prefix, partitions=2)
        scripts, asked = backend._context.scripts, asyncio.Event()
        run, gone = scripts.run, scripts.partitions.names[0]
        keys = [f"k{number}" for number in range(8)]
        consumer = backend.subscribe(keys, "c")
        await consumer.receive(1, 0)

        async def fails(name: str, partition: str, *words: Any, **more: Any) -> Any:
            if partition != gone or name == "leave":
                return await run(name, partition, *words, **more)
            asked.set()
            await until(lambda: consumer.closed)
            raise BackendUnavailable("away") from NotReached("away")

        monkeypatch.setattr(scripts, "run", fails)
        receive = asyncio.create_task(consumer.receive(1, None))
        await asked.wait()
        await closed(backend)
        assert await ended(receive) == [Received()]
