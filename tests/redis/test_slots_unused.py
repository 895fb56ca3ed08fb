"""Leases without a job at Redis endpoints that must not get jobs: lost answers, a full store and deleted keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from taskqueue_core.capabilities import Seen, SlotLease, SlotPool
from tests.redis.backends import keys_of, opened
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.servers import RedisServer
from tests.redis.test_answers_lost import lossy
from tests.redis.test_slots import MODEL, endpoint, held

_VERBS: dict[str, Callable[[SlotPool], Awaitable[object]]] = {
    "drain": lambda slots: slots.drain(MODEL, "s1"),
    "remove": lambda slots: slots.remove(MODEL, "s1"),
    "rest": lambda slots: slots.rest(MODEL, "s1", 60),
    "silence": lambda slots: slots.reconcile(MODEL, "s1", None, settled=0),
}
_of_each_verb = pytest.mark.parametrize("verb", _VERBS)


async def _busy_and_idle(slots: SlotPool) -> tuple[SlotLease, tuple[SlotLease, ...]]:
    """Acquire three slots of an endpoint and assign a job to one of them."""
    await slots.register(endpoint(slots=3, reports=True))
    await slots.reconcile(MODEL, "s1", Seen(active=0), settled=0)
    busy, *idle = await slots.acquire(MODEL, "h", ttl=60, limit=3)
    assert None not in await slots.assign((busy, "job"), ttl=60)
    return busy, tuple(idle)


@_of_each_verb
async def test_without_memory(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str, verb: str
) -> None:
    """E6, faults B8 and H7: without memory, draining or removing an endpoint still ends its leases without a job.

    Its other lease stays.
    """
    with make_server(each_engine) as server:
        async with opened(server.url, redis_prefix) as backend:
            busy, idle = await _busy_and_idle(backend.slots)
            server.call("CONFIG", "SET", "maxmemory", "1")
            await _VERBS[verb](backend.slots)
            assert await held(backend) == 1
            assert await backend.slots.renew(*idle, ttl=60) == (None, None)
            assert await backend.slots.release(busy) == (True,)
            server.call("CONFIG", "SET", "maxmemory", "0")


@pytest.mark.parametrize("verb", [verb for verb in _VERBS if verb != "silence"])
async def test_lost_answers(each_redis: RedisServer, redis_prefix: str, verb: str) -> None:
    """Faults E3 and H7: a call that is repeated after a lost answer ends the leases without a job, and no other."""
    async with lossy(each_redis, redis_prefix) as (proxy, backend, other):
        busy, idle = await _busy_and_idle(other.slots)
        proxy.lose_replies(1, after=b"EVALSHA")
        assert await _VERBS[verb](backend.slots)
        assert proxy.losing == 0
        assert await held(other) == 1
        assert await other.slots.release(*idle, busy) == (False, False, True)


@_of_each_verb
async def test_a_foreign_hand(redis_server: RedisServer, redis_prefix: str, verb: str) -> None:
    """Faults H7 and H9: leases without a job end completely, even if their index was deleted."""
    async with opened(redis_server.url, redis_prefix) as backend:
        _, idle = await _busy_and_idle(backend.slots)
        (named,) = (key for key in keys_of(redis_server, redis_prefix) if key.endswith(":u"))
        assert redis_server.call("DEL", named) == 1
        await _VERBS[verb](backend.slots)
        assert await held(backend) == 1
        assert await backend.slots.renew(*idle, ttl=60) == (None, None)
        lapses = f"{{{redis_prefix}:0}}:slots:lapses"
        assert redis_server.call("ZCARD", lapses) == 0
