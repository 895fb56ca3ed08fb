"""Records in Redis that contradict the entry of their task, and entries of other programs."""

from __future__ import annotations

import asyncio

from tests.redis.backends import KEY, PATIENCE, housekept, opened, publish, take
from tests.redis.servers import RedisServer
from tests.redis.test_damage import name_of, returned


async def test_a_record_contradicts_the_entry(redis_server: RedisServer, redis_prefix: str) -> None:
    """U29: a released task is executed once, even if its record says that it was executed."""
    async with opened(redis_server.url, redis_prefix) as backend, housekept(backend):
        await returned(backend)
        name = f"{name_of(backend)}/t"
        record = redis_server.call("HGET", name, "t")
        redis_server.call("HSET", name, "t", b"\x03\x00" + record[2:])
        async with backend.subscribe([KEY], "c") as consumer, asyncio.timeout(PATIENCE):
            await consumer.ack(*(await take(consumer, 1)))
        ledger = await backend.control.ledger(KEY)
        assert ledger.balanced
        assert ledger.done == 1


async def test_an_entry_of_another_program_has_a_deadline(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29: an entry that is no task and is past its deadline stops no other task."""
    async with opened(redis_server.url, redis_prefix) as backend, housekept(backend):
        await publish(backend, "a")
        junk = ("foreign", "junkjunkjunk", "more", "1:0:0:5")
        last = redis_server.call("XREVRANGE", f"{name_of(backend)}/s5", "+", "-")[0][0]
        fence = int(last.split(b"-")[0]) + 1
        redis_server.call("XADD", f"{name_of(backend)}/s5", f"{fence}-0", *junk)
        await publish(backend, "b")
        executed: set[str] = set()
        async with backend.subscribe([KEY], "c") as consumer, asyncio.timeout(PATIENCE):
            while not {"a", "b"} <= executed:
                for delivery in (await consumer.receive(10, 1.0)).deliveries:
                    executed.add(delivery.task.id)
                    await consumer.ack(delivery)
