"""Random damage to the stored data of tasks in every state."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Delivery, Task
from tests.redis.backends import KEY, PATIENCE, housekept, opened, take, until
from tests.redis.servers import RedisServer
from tests.redis.test_damage import name_of

_LIVE = ("first", "held", "waiting", "flying", "released", "retried", "scheduled")
_DEAD = "dead"
_ENDED = "ended"


def _damage(server: RedisServer, name: str, field: str, chance: random.Random) -> None:
    """Flip bits of a field of a hash, cut it, or delete it."""
    value = bytearray(server.call("HGET", name, field))
    kind = chance.randrange(3)
    if kind == 0:
        for _ in range(chance.choice([1, 1, 2, 8])):
            value[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        server.call("HSET", name, field, bytes(value))
    elif kind == 1:
        server.call("HSET", name, field, bytes(value[: chance.randrange(len(value))]))
    else:
        server.call("HDEL", name, field)


@pytest.mark.parametrize("seed", range(24))
async def test_records_are_damaged_at_random(
    seed: int, redis_server: RedisServer, redis_prefix: str
) -> None:
    """U29, laws 1 and 10: with damaged records in every state, each task with its payload ends and no script fails."""
    chance = random.Random(seed)
    async with opened(redis_server.url, redis_prefix) as backend, asyncio.timeout(PATIENCE):
        publisher, name = backend.publisher, name_of(backend)
        executed: set[str] = set()
        async with backend.subscribe([KEY], "c") as consumer:
            early = [
                Task.of(KEY, n, id=n) for n in ("flying", "released", "retried", _DEAD, _ENDED)
            ]
            await publisher.publish(*early)
            given = {delivery.task.id: delivery for delivery in await take(consumer, 5)}
            await publisher.publish(
                Task.of(KEY, "first", id="first", ordering_key="e", tenant="acme"),
                Task.of(KEY, "held", id="held", ordering_key="e", tenant="acme"),
                Task.of(KEY, "waiting", id="waiting", priority=chance.randrange(10)),
                Task.of(KEY, "scheduled", id="scheduled", not_before=backend.now() + 0.3),
            )
            retried, due = given["retried"], backend.now() + 0.2
            await publisher.schedule_retry(retried.task, due, settles=retried, error="e")
            await consumer.redeliver(given["released"])
            await consumer.dead_letter(given[_DEAD], "broken")
            await consumer.ack(given[_ENDED])
            for kept in ("t", "x"):
                fields = [field.decode() for field in redis_server.call("HKEYS", f"{name}/{kept}")]
                for field in chance.sample(
                    sorted(fields), min(len(fields), chance.randrange(1, 5))
                ):
                    _damage(redis_server, f"{name}/{kept}", field, chance)

            async def settle(delivery: Delivery) -> None:
                with contextlib.suppress(LeaseLost):
                    await consumer.ack(delivery)
                    executed.add(delivery.task.id)

            async with housekept(backend):
                await settle(given["flying"])
                while not executed.issuperset(_LIVE):
                    for delivery in (await consumer.receive(10, 0.5)).deliveries:
                        await settle(delivery)
                await backend.dead_letters.redrive(KEY)
                (letter,) = await take(consumer, 1)
                assert letter.task.id == _DEAD
                await settle(letter)

                async def settled() -> bool:
                    ledger = await backend.control.ledger(KEY)
                    return ledger.balanced and ledger.done == 9

                await until(settled, "the ledger balances")
