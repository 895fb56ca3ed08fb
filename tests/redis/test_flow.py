"""Queue limits on a shared store: they hold across processes, restarts and the death of a worker."""

from __future__ import annotations

import asyncio
from typing import Any

from taskqueue_core.rate_limit import IntervalUnit, RateLimit
from taskqueue_core.tasks import Published, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, PATIENCE, fall_silent, housekept, opened, publish, take, until
from tests.redis.conftest import MakeServer
from tests.redis.servers import RedisServer


async def limit(backend: RedisBackend, **limits: Any) -> None:
    """Change the limits of the queue."""
    settings = await backend.control.settings(KEY)
    await backend.control.configure(KEY, settings.model_copy(update=limits))


async def test_the_silent_keep_their_places_for_a_lease(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """F2, OPEN-F1, law 5: deliveries of a dead worker no longer count against the limit once its lease is over.

    A waiting receive then gets them.
    """
    async with (
        opened(redis_url, redis_prefix) as alive,
        opened(redis_url, redis_prefix) as dying,
        housekept(alive),
    ):
        await limit(alive, max_inflight=2)
        await publish(alive, *"abc")
        lost = dying.subscribe([KEY], "dying")
        await take(lost, 2)
        async with alive.subscribe([KEY], "alive") as consumer:
            waiting = asyncio.create_task(consumer.receive(3, None))
            await until(lambda: consumer.asleep, "it waits for a place")
            assert not waiting.done()
            await fall_silent(redis_server, dying, lost.token)
            async with asyncio.timeout(PATIENCE):
                found = [*(await waiting).deliveries]
                found += await take(consumer, 2 - len(found))
            assert [(d.task.id, d.losses) for d in found] == [("a", 1), ("b", 1)]
            assert (await consumer.receive(3, 0)).deliveries == ()


async def test_limits_outlive_the_store(make_server: MakeServer, redis_prefix: str) -> None:
    """F2, F3, F6, B13, GOAL-AB, law 5: limits, used tokens and waiting tasks are kept when the store restarts."""
    with make_server(aof=True) as server:
        async with opened(server.url, redis_prefix) as backend:
            rate = RateLimit(max_tokens=3, interval=1, interval_unit=IntervalUnit.HOURS)
            await limit(backend, capacity=2, rate_limit=rate, intake_paused=False)
            await publish(backend, "a", "b")
            async with backend.subscribe([KEY], "c") as consumer:
                await consumer.ack(*await take(consumer, 2))
            await publish(backend, "c", "d")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        async with opened(server.url, redis_prefix) as backend:
            told = await backend.publisher.publish(Task(key=KEY, id="d"), Task(key=KEY, id="e"))
            assert [one.status for one in told] == [Published.DUPLICATE, Published.REFUSED]
            async with backend.subscribe([KEY], "c") as consumer:
                taken = (await consumer.receive(5, 0)).deliveries
                assert [d.task.id for d in taken] == ["c"]
                empty = await consumer.receive(5, 0)
                assert empty.deliveries == ()
                assert empty.due_at is not None
                assert empty.due_at > backend.now() + 600


async def test_a_pause_reaches_every_process_at_once(redis_url: str, redis_prefix: str) -> None:
    """F6, F7, OPEN-F1, laws 5 and 9: once a pause is confirmed, no consumer in any process gets another delivery."""
    async with opened(redis_url, redis_prefix) as one, opened(redis_url, redis_prefix) as two:
        consumers = [backend.subscribe([KEY], f"c{n}") for n, backend in enumerate((one, two) * 5)]
        await publish(one, *(f"t{n}" for n in range(5000)))
        got: list[str] = []
        confirmed = False

        async def consume(consumer: Any) -> None:
            while not confirmed:
                received = await consumer.receive(5, 0.05)
                got.extend(d.task.id for d in received.deliveries)
                await consumer.ack(*received.deliveries)

        running = [asyncio.create_task(consume(consumer)) for consumer in consumers]
        await until(lambda: len(got) > 50, "they are at it")
        await limit(two, paused=True)
        delivered = (await one.control.stats(KEY)).delivered
        confirmed = True
        await asyncio.gather(*running)
        for consumer in consumers:
            assert (await consumer.receive(5, 0)).deliveries == ()
        assert (await one.control.stats(KEY)).delivered == delivered == len(got) < 5000
        for consumer in consumers:
            await consumer.close()


async def test_unlimited_again(each_redis: RedisServer, redis_prefix: str) -> None:
    """F2, law 9: after all limits of a queue were removed, the store has no key for them."""
    async with opened(each_redis.url, redis_prefix) as backend:
        name = f"{{{redis_prefix}:0}}:q:{KEY}/f"
        await limit(backend, max_inflight=1, capacity=1)
        assert each_redis.call("EXISTS", name) == 1
        await limit(backend, max_inflight=None, capacity=None)
        assert each_redis.call("EXISTS", name) == 0
        await publish(backend, "a", "b")
        async with backend.subscribe([KEY], "c") as consumer:
            assert len(await take(consumer, 2)) == 2
