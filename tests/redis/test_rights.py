"""A right that is taken away while the backend works: calls fail as a whole, and continue when it is back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import pytest

from taskqueue_core.backend import Subscription
from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import Delivery
from taskqueue_redis import RedisBackend
from taskqueue_redis.setup.permissions import access_list
from tests.redis.backends import KEY, housekept, opened, publish, take
from tests.redis.conftest import MakeServer

SECRET = "canary-5up3r"
CHECKED = 0.01
"""seconds of the store's time between two checks of the rights"""

Act = Callable[[RedisBackend, Subscription, Sequence[Delivery]], Awaitable[object]]


async def _redeliver(_: RedisBackend, consumer: Subscription, held: Sequence[Delivery]) -> object:
    return await consumer.redeliver(*held)


async def _ack(_: RedisBackend, consumer: Subscription, held: Sequence[Delivery]) -> object:
    return await consumer.ack(*held)


async def _retry(backend: RedisBackend, _: Subscription, held: Sequence[Delivery]) -> object:
    return await backend.publisher.schedule_retry(held[0].task, backend.now(), settles=held[0])


async def _receive(_: RedisBackend, consumer: Subscription, __: Sequence[Delivery]) -> object:
    return await consumer.receive(10, 0)


async def _close(_: RedisBackend, consumer: Subscription, __: Sequence[Delivery]) -> None:
    await consumer.close()


@pytest.mark.parametrize(
    ("act", "right"),
    [
        (_redeliver, "zadd"), (_redeliver, "hset"), (_ack, "xdel"), (_ack, "rpush"), (_ack, "set"),
        (_retry, "zadd"), (_retry, "xpending"), (_receive, "hset"), (_close, "hset"), (_close, "xdel"),
        (_close, "xpending"),
    ],
)  # fmt: skip
async def test_a_missing_right(make_server: MakeServer, act: Act, right: str) -> None:
    """U28, law 1: without a right, nothing is executed, so no task is lost or stuck once the right is back."""
    rules = access_list("tq", password=f">{SECRET}")
    server = make_server(acl=f"user default on >{SECRET} ~* &* +@all\n{rules.splitlines()[1]}")
    server.start()
    server.login = ("default", SECRET)
    url = f"redis://taskqueue:{SECRET}@127.0.0.1:{server.port}"
    async with opened(server.url, "tq") as other, opened(url, "tq", operation_timeout=0.5) as ours:
        await ours.control.configure(KEY, QueueSettings(order=Order.FAIR))
        await publish(ours, *(f"t{number}" for number in range(10)))
        consumer = ours.subscribe([KEY], "c")
        held = await take(consumer, 5)
        server.call("ACL", "SETUSER", "taskqueue", f"-{right}")
        time.sleep(2 * CHECKED)  # noqa: ASYNC251 - the store's time passes; nothing runs meanwhile
        with pytest.raises(BackendUnavailable):
            await act(ours, consumer, held)
        server.call("ACL", "SETUSER", "taskqueue", f"+{right}")
        await consumer.close()
        async with housekept(other), other.subscribe([KEY], "d") as heir:
            assert len({delivery.task.id for delivery in await take(heir, 10)}) == 10
        ledger = await other.control.ledger(KEY)
    assert ledger.balanced
