"""Leases of consumers: a live consumer keeps its deliveries, and those of a silent one go to others."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import LeaseLost
from taskqueue_core.tasks import Settled
from taskqueue_redis import RedisBackend, RedisSettings
from tests.chaos.proxy import FaultProxy
from tests.redis.backends import (
    HOUSEKEEPING,
    KEY,
    LEASE,
    PATIENCE,
    fall_silent,
    housekept,
    keys_of,
    opened,
    publish,
    stream,
    take,
    until,
)
from tests.redis.engines import Engine
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

RECOVERY = LEASE + 2 * HOUSEKEEPING
"""seconds from the last heartbeat of a silent consumer until other consumers have its deliveries"""


async def test_deliveries_of_a_closed_event_loop(redis_url: str, redis_prefix: str) -> None:
    """A10, fault A5: heartbeats end with the event loop, so that its deliveries go to others without `aclose`."""
    values: dict[str, Any] = {"lease": LEASE, "housekeeping": HOUSEKEEPING, "prefix": redis_prefix}
    backend = RedisBackend(settings=settings_for(redis_url, **values))

    async def take_one() -> None:
        await publish(backend, "a")
        await take(backend.subscribe([KEY], "first"), 1)
        await backend._context.client.aclose()  # sockets that are open would be a warning

    await asyncio.to_thread(lambda: asyncio.run(take_one()))
    async with opened(redis_url, redis_prefix) as other, housekept(other):
        (delivery,) = await take(other.subscribe([KEY], "second"), 1)
        assert delivery.task.id == "a"
    heartbeat = backend._context.heartbeat
    assert heartbeat._thread is None


async def test_a_blocked_event_loop_costs_nothing(redis_url: str, redis_prefix: str) -> None:
    """A10, A12, D14, BUG-D5, fault A5: a handler that blocks the event loop past its lease keeps its deliveries.

    Heartbeats are sent from a separate thread, and a renewed lease is not another delivery. A13, D16, A14: a
    consumer that no longer receives keeps its batch until it settles it; closing releases the rest.
    """
    stop, passes = threading.Event(), [0]

    async def elsewhere() -> None:
        async with opened(redis_url, redis_prefix) as other:
            while not stop.is_set():
                assert (await other.control.maintain()).recovered == 0
                passes[0] += 1
                await asyncio.sleep(HOUSEKEEPING)

    housekeeper = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, *"abcd")
        subscription = backend.subscribe([KEY], "c")
        batch = await take(subscription, 3, limit=3)
        housekeeper.start()
        time.sleep(RECOVERY + HOUSEKEEPING)  # noqa: ASYNC251 - simulates a handler that blocks the event loop
        stop.set()
        await asyncio.to_thread(housekeeper.join)
        assert passes[0] > LEASE / HOUSEKEEPING
        stats = await backend.control.stats(KEY)
        assert (stats.delivered, stats.redelivered, stats.lost) == (3, 0, 0)
        assert await subscription.ack(*batch[:2]) == (Settled.OK, Settled.OK)
        assert backend._context.receipts.of(subscription) == [batch[2].receipt]
        assert (await backend.control.ledger(KEY)).waiting == 1
        await subscription.close()
        async with backend.subscribe([KEY], "heir") as heir:
            found = await take(heir, 2)
        assert [(d.task.id, d.losses, d.attempt) for d in found] == [("c", 0, 1), ("d", 0, 1)]
        assert (await backend.control.stats(KEY)).lost == 0


async def test_silence_gives_everything_to_others(
    redis_server: RedisServer, redis_url: str, redis_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A15, A22, BUG-D3, OPEN-A5, D12: once a process was silent for a lease, the next pass releases its deliveries.

    Another consumer gets them with their bodies, ahead of new tasks, as the same attempt with one loss. This holds
    for several queues and priorities, and for tasks that had been released before.
    """
    async with opened(redis_url, redis_prefix) as alive:
        await publish(alive, "a", payload=b'{"n": 1}')
        await publish(alive, "b", key="other", priority=9)
        await publish(alive, "c", key="third")
        async with opened(redis_url, redis_prefix) as silent:
            lost = silent.subscribe([KEY, "other", "third"], "silent")
            (returned,) = [d for d in await take(lost, 3) if d.task.id == "c"]
            await lost.redeliver(returned)
            await take(lost, 1)
            await publish(alive, "new", payload=b'"n"')
            await fall_silent(redis_server, silent, lost.token)
            with caplog.at_level(logging.WARNING, "taskqueue.redis"):
                async with alive.subscribe([KEY, "other", "third"], "alive") as heir:
                    assert [d.task.id for d in await take(heir, 1)] == ["new"]
                    assert (await alive.control.maintain()).recovered == 3
                    found = {d.task.id: d for d in await take(heir, 3)}
                    assert found.keys() == {"a", "b", "c"}
                    assert found["a"].task.payload == b'{"n": 1}'
                    assert {(d.attempt, d.losses) for d in found.values()} == {(1, 1)}
                    await heir.ack(*found.values())
                    told = [r.message for r in caplog.records if "silent" in r.message]
            assert told == ["worker silent stopped responding; its deliveries were taken back"]
        assert await alive.control.workers() == ()
    left = keys_of(redis_server, redis_prefix)
    assert not [name for name in left if lost.token in name or ":o:" in name or ":c:" in name]


async def test_ten_thousand_live_ones_in_front(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """BUG-D5, A10, fault A10: one pass recovers a stale delivery behind 10,000 deliveries of a live consumer."""
    async with opened(redis_url, redis_prefix) as backend, opened(redis_url, redis_prefix) as other:
        await publish(backend, *(f"t{n}" for n in range(10_001)))
        async with backend.subscribe([KEY], "live") as live:
            await take(live, 10_000)
            lost = other.subscribe([KEY], "lost")
            (delivery,) = await take(lost, 1)
            assert delivery.task.id == "t10000"
            await fall_silent(redis_server, other, lost.token)
            assert (await backend.control.maintain()).recovered == 1
            (again,) = await take(live, 1)
            assert (again.task.id, again.losses) == ("t10000", 1)
            stats = await backend.control.stats(KEY)
            assert (stats.lost, stats.redelivered) == (1, 1)


async def test_the_dead_are_recovered_page_by_page(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """A21, A25, D12, BUG-D5: deliveries of a dead consumer are recovered in pages of bounded size, in order.

    Then its consumer is removed.
    """
    async with opened(redis_url, redis_prefix) as backend, opened(redis_url, redis_prefix) as other:
        await publish(backend, *(f"t{n:04}" for n in range(1100)))
        lost = other.subscribe([KEY], "lost")
        assert [d.task.id for d in await take(lost, 1100)] == [f"t{n:04}" for n in range(1100)]
        await fall_silent(redis_server, other, lost.token)
        moved: list[int] = []
        consumer = f"{{{redis_prefix}:0}}:c:{lost.token}"

        async def all_moved() -> bool:
            known = redis_server.call("EXISTS", consumer) == 1
            assert known == (sum(moved) < 1100)
            if number := (await backend.control.maintain()).recovered:
                moved.append(number)
            return sum(moved) >= 1100

        await until(all_moved, "everything was taken back")
        assert moved == [500, 500, 100]
        assert redis_server.call("EXISTS", consumer) == 0
        assert redis_server.call("XINFO", "CONSUMERS", stream(redis_prefix), "g") == []
        async with backend.subscribe([KEY], "heir") as heir:
            ids = [d.task.id for d in await take(heir, 1100)]
        assert ids == [f"t{n:04}" for n in range(1100)]


@pytest.mark.oldest
@pytest.mark.parametrize("end", ["closed", "lost"])
async def test_no_group_keeps_a_consumer_that_has_gone(
    each_redis: RedisServer, each_engine: Engine, redis_prefix: str, end: str
) -> None:
    """E6: a consumer that has gone is a member of no group, also where it read but received nothing.

    It read a lane that was empty (which makes it a member since Redis 7.2), a task that had expired, and in fair
    order a task that another program had deleted.
    """
    clock, keys = ManualClock(1_700_000_000.0), [KEY, "late", "fair"]
    async with opened(each_redis.url, redis_prefix, clock=clock) as backend:
        await backend.control.configure("fair", QueueSettings(order=Order.FAIR))
        await publish(backend, "first", priority=9)
        async with backend.subscribe([KEY], "earlier") as earlier:
            await earlier.ack(*await take(earlier, 1))
        await publish(backend, "last")
        await publish(backend, "late", key="late", deadline=backend.now() + 1)
        await publish(backend, "deleted", key="fair")
        name = stream(redis_prefix, key="fair")
        each_redis.call("XDEL", name, each_redis.call("XRANGE", name, "-", "+")[0][0])
        await clock.advance(2)
        gone = backend.subscribe(keys, "gone")
        await take(gone, 1, limit=9)

        def is_member(lane: str, key: str) -> bool:
            members = each_redis.call("XINFO", "CONSUMERS", stream(redis_prefix, lane, key), "g")
            return gone.token.encode() in {member[1] for member in members}

        lanes = ("s9", KEY), ("s5", KEY), ("s5", "late"), ("s5", "fair")
        without_entry = each_engine.version >= (7, 2, 0)
        expected = [without_entry, True, True, without_entry]
        assert [is_member(*lane) for lane in lanes] == expected
        if end == "lost":
            await fall_silent(each_redis, backend, gone.token)
            assert (await backend.control.maintain()).recovered == 1
        else:
            await gone.close()
        assert not any(is_member(*lane) for lane in lanes)


async def test_after_a_gap_all_consumers_have_a_whole_lease(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """Fault B10: if maintenance did not run for a while, silence counts from the first pass on."""
    async with opened(redis_url, redis_prefix) as backend, opened(redis_url, redis_prefix) as other:
        await publish(backend, "t")
        lost = other.subscribe([KEY], "lost")
        await take(lost, 1)
        await fall_silent(redis_server, other, lost.token)
        # Make the store believe that its last maintenance pass was long ago.
        redis_server.call("HSET", f"{{{redis_prefix}:0}}:meta", "swept", 1)
        since = time.monotonic()
        assert (await backend.control.maintain()).recovered == 0
        async with housekept(backend), backend.subscribe([KEY], "heir") as heir:
            await take(heir, 1)
        assert time.monotonic() - since >= LEASE


async def test_a_consumer_that_was_given_up_learns_it_and_continues(
    redis_url: str, redis_prefix: str
) -> None:
    """Fault A4, OPEN-A7, D10: a consumer whose deliveries were recovered learns it, and its receipts are stale.

    Its next heartbeat takes nothing back, and it continues under a new token.
    """
    async with opened(redis_url, redis_prefix) as backend, opened(redis_url, redis_prefix) as other:
        await publish(backend, "t")
        async with other.subscribe([KEY], "slow") as slow:
            (old,) = await take(slow, 1)
            token = slow.token
            other._context.heartbeat.remove(token)
            async with backend.subscribe([KEY], "heir") as heir:
                async with housekept(backend):
                    (new,) = await take(heir, 1)
                # The slow consumer sends heartbeats again.
                other._context.heartbeat.add(slow, f"{{{redis_prefix}:0}}")
                async with asyncio.timeout(PATIENCE):
                    assert await slow.revoked() == (old.receipt,)
                for settle in (slow.ack, slow.redeliver):
                    with pytest.raises(LeaseLost):
                        await settle(old)
                (status,) = await backend.control.statuses(KEY, "t")
                assert status is not None
                assert (status.state.value, status.losses) == ("in_flight", 1)
                await publish(backend, "u")
                (more,) = await take(slow, 1)
                assert slow.token != token
                assert await slow.ack(more) == (Settled.OK,)
                assert await heir.ack(new) == (Settled.OK,)
        stats = await backend.control.stats(KEY)
    assert (stats.lost, stats.ledger.done) == (1, 2)


@pytest.mark.parametrize("receives", [False, True])
async def test_an_idle_consumer_whose_lease_has_expired(
    redis_server: RedisServer, redis_url: str, redis_prefix: str, *, receives: bool
) -> None:
    """A10, row U26: an idle consumer that was silent for a lease is listed again, once, and gets the next task."""
    async with opened(redis_url, redis_prefix) as backend, opened(redis_url, redis_prefix) as other:
        async with other.subscribe([KEY], "idle") as idle:
            await idle.adopt()
            receiving = asyncio.create_task(idle.receive(1, None)) if receives else None
            await until(lambda: idle.asleep or not receives, "it waits")
            old = idle.token
            # as maintenance does after a lease
            redis_server.call("ZREM", f"{{{redis_prefix}:0}}:alive", old)

            async def listed() -> bool:
                names = [each.worker_id for each in await backend.control.workers()]
                return names == ["idle"] and idle.token != old

            await until(listed, "the consumer is listed again")
            await publish(backend, "t")
            async with asyncio.timeout(PATIENCE):
                received = await (receiving or idle.receive(1, None))
            assert [each.task.id for each in received.deliveries] == ["t"]
            await idle.ack(*received.deliveries)
        assert await backend.control.workers() == ()


async def test_a_slow_store_causes_no_redelivery(
    redis_server: RedisServer, redis_url: str, redis_prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A10, fault B19: heartbeats delayed by a slow store, for up to two thirds of their interval, keep the lease."""
    async with FaultProxy(("127.0.0.1", redis_server.port)) as proxy:
        slow_url = f"redis://127.0.0.1:{proxy.address[1]}"
        async with (
            opened(slow_url, redis_prefix, operation_timeout=0.5) as slow,
            opened(redis_url, redis_prefix) as other,
        ):
            await publish(other, "t")
            async with slow.subscribe([KEY], "c") as subscription, housekept(other):
                (delivery,) = await take(subscription, 1)
                alive = "ZSCORE", f"{{{redis_prefix}:0}}:alive", subscription.token
                first = redis_server.call(*alive)
                await until(lambda: redis_server.call(*alive) != first, "a sign of life")
                proxy.delay(LEASE / 3 * 2 / 3)
                await asyncio.sleep(RECOVERY)
                proxy.heal()
                assert await subscription.ack(delivery) == (Settled.OK,)
                proxy.refuse()
                proxy.cut()
                await until(
                    lambda: any("heartbeat" in r.message for r in caplog.records),
                    "a sign of life that fails is reported",
                )
                proxy.heal()
    assert (await _stats(redis_url, redis_prefix)) == (1, 0)


async def _stats(url: str, prefix: str) -> tuple[int, int]:
    async with opened(url, prefix) as backend:
        stats = await backend.control.stats(KEY)
        return stats.delivered, stats.lost


def test_defaults() -> None:
    """D13, A12, A22: by default the lease is 15 s, maintenance runs every 2 s, and keys have the prefix ``tq``."""
    settings = RedisSettings(_env_file=None)
    assert (settings.lease, settings.housekeeping, settings.prefix) == (15.0, 2.0, "tq")
    assert settings.lease + 2 * 1.5 * settings.housekeeping <= 30
