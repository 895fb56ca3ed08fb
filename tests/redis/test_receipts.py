"""Receipts: forged ones have no effect, and acks sent before a consumer closes still take effect."""

from __future__ import annotations

import asyncio
import re

import msgspec
import pytest

from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Settled
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.servers import RedisServer


async def test_receipts_that_were_never_issued(each_redis: RedisServer, redis_prefix: str) -> None:
    """Law 7, D16: a receipt changed to another consumer or another queue is refused (fault M5)."""
    async with opened(each_redis.url, redis_prefix) as backend:
        await publish(backend, "a")
        async with backend.subscribe([KEY], "one") as one, backend.subscribe([KEY], "two") as two:
            (delivery,) = await take(one, 1)
            for forged in (
                delivery.receipt.replace(one.token, two.token),
                delivery.receipt.replace(one.token, "0" * 16 + "-1"),
                "nonsense",
            ):
                other = msgspec.structs.replace(delivery, receipt=forged)
                with pytest.raises(LeaseLost):
                    await two.ack(other)
                assert not await backend.control.progress(other, 0.5)
            elsewhere = msgspec.structs.replace(delivery.task, key="elsewhere")
            assert not await backend.control.progress(
                msgspec.structs.replace(delivery, task=elsewhere), 0.5
            )
            assert await backend.control.progress(delivery, 0.5)
            assert await one.ack(delivery) == (Settled.OK,)


async def test_receipts_of_one_process_share_no_secret(
    each_redis: RedisServer, redis_prefix: str
) -> None:
    """Issue 22, A3: two consumers of one process share no more than the process id; 128 bits differ."""
    async with opened(each_redis.url, redis_prefix) as backend:
        await publish(backend, "a", "b")
        async with backend.subscribe([KEY], "one") as one, backend.subscribe([KEY], "two") as two:
            (first,), (second,) = await take(one, 1), await take(two, 1)
        tokens = [delivery.receipt.split(".")[2] for delivery in (first, second)]
        secrets = [re.fullmatch(r"[0-9a-f]{16}-([0-9a-f]{32})", token) for token in tokens]
        assert all(secrets), tokens
        assert len({match[1] for match in secrets if match}) == 2


async def test_acks_that_were_asked_for_before_it_left(
    each_redis: RedisServer, redis_prefix: str
) -> None:
    """A13, A17: closing a consumer waits for pending acks, and releases only the other deliveries (fault M5)."""
    async with opened(each_redis.url, redis_prefix) as backend:
        await publish(backend, *"abcde")
        consumer = backend.subscribe([KEY], "c")
        deliveries = await take(consumer, 5)
        acks = [asyncio.create_task(consumer.ack(one)) for one in deliveries[:4]]
        await asyncio.sleep(0)  # the first ack is being sent, and the others wait for it
        await consumer.close()
        assert await asyncio.gather(*acks) == [(Settled.OK,)] * 4
        ledger = await backend.control.ledger(KEY)
        assert (ledger.done, ledger.waiting) == (4, 1)


async def test_receipts_that_were_revoked(each_redis: RedisServer, redis_prefix: str) -> None:
    """A14, law 7: after a delivery was revoked, its consumer keeps no receipt of it (fault M5)."""
    async with opened(each_redis.url, redis_prefix) as backend:
        await publish(backend, "a")
        async with backend.subscribe([KEY], "c") as consumer:
            (delivery,) = await take(consumer, 1)
            assert backend._context.receipts.of(consumer) == [delivery.receipt]
            assert await backend.control.cancel(KEY, "a")
            assert await consumer.revoked() == (delivery.receipt,)
            assert backend._context.receipts.of(consumer) == []
            with pytest.raises(LeaseLost):
                await consumer.ack(delivery)
