"""Waiting consumers are woken by notifications: none polls, no notification is missed, and connections do not grow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from taskqueue_conformance.suites.streams import new
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Received, Task
from taskqueue_redis import wakeups
from taskqueue_redis.subscription import RedisSubscription
from tests.redis.backends import KEY, PATIENCE, counted_wakeups, opened, publish, take, until
from tests.redis.conftest import MakeServer
from tests.redis.servers import RedisServer

# Commands run by this test or by Redis itself.
_OURS = {"cmdstat_info", "cmdstat_command", "cmdstat_client", "cmdstat_client|list"}


def calls(server: RedisServer) -> dict[str, int]:
    """Return how often each command was executed, directly or by scripts."""
    told = server.info("commandstats")
    counts = {name: int(text.split(",")[0].removeprefix("calls=")) for name, text in told.items()}
    return {name: number for name, number in counts.items() if name not in _OURS}


def connections(server: RedisServer) -> int:
    """Return the number of connections opened by backends."""
    told = server.call("CLIENT", "LIST").decode()
    return sum("name=taskqueue" in line for line in told.splitlines())


async def all_asleep(subscriptions: Iterable[RedisSubscription]) -> None:
    """Wait until all subscriptions are waiting for a notification."""
    for subscription in subscriptions:
        await until(lambda: subscription.asleep, "it waits")  # noqa: B023 - awaited in this iteration


async def test_waiting_subscriptions_do_not_poll(
    make_server: MakeServer, redis_prefix: str
) -> None:
    """A11, D8, OPEN-E2, fault E10: 300 waiting subscriptions run no command and use two connections.

    They wait longer than the limit for an answer of Redis, because they have sent no command.
    """
    with make_server() as server:
        async with opened(server.url, redis_prefix, lease=60.0, answer_timeout=0.3) as backend:
            keys = [f"{KEY}{n}" for n in range(300)]
            waiting = [backend.subscribe([key, "all"], "c") for key in keys]
            receives = [asyncio.create_task(one.receive(1, None)) for one in waiting]
            await all_asleep(waiting)
            assert connections(server) <= 2
            before, earlier = calls(server), dict[str, int]()
            # Wait until the queries that each subscription makes before it waits have ended.
            async with asyncio.timeout(PATIENCE):
                while before != earlier:
                    await asyncio.sleep(0.1)
                    before, earlier = calls(server), before
            with counted_wakeups() as counted:
                await asyncio.sleep(0.6)
            assert calls(server) == before
            assert counted["wakeups"] < len(keys), "each subscription polls"
            assert not any(receive.done() for receive in receives)
            # Each receive gets the task of its own queue, and no other.
            await asyncio.gather(*(publish(backend, "t", key=key) for key in keys))
            for key, receive in zip(keys, receives, strict=True):
                (delivery,) = (await receive).deliveries
                assert delivery.task.key == key
            assert connections(server) <= 2


async def test_publishers_at_a_limit_do_not_poll(
    make_server: MakeServer, redis_prefix: str
) -> None:
    """A11, D8: a receive waiting for a queue at its limit runs no command until it can take a task (fault M5)."""
    with make_server() as server:
        async with opened(server.url, redis_prefix, lease=60.0) as backend:
            await backend.control.configure(KEY, QueueSettings(max_inflight=1))
            await publish(backend, "t0", "t1")
            async with backend.subscribe([KEY], "c") as one, backend.subscribe([KEY], "c") as two:
                (held,) = await take(one, 1)
                receive = asyncio.create_task(two.receive(1, None))
                await all_asleep([two])
                before, earlier = calls(server), dict[str, int]()
                # Wait until the query that the subscription makes before it waits has ended.
                async with asyncio.timeout(PATIENCE):
                    while before != earlier:
                        await asyncio.sleep(0.1)
                        before, earlier = calls(server), before
                assert not receive.done()
                await one.ack(held)
                assert [d.task.id for d in (await receive).deliveries] == ["t1"]


async def test_connections_do_not_grow(make_server: MakeServer, redis_prefix: str) -> None:
    """OPEN-E2, E6, fault M7: the number of connections does not grow with queues, subscriptions or load.

    Closing leaves none.
    """
    with make_server() as server:
        async with opened(server.url, redis_prefix) as backend:
            async with backend.subscribe([KEY], "one") as one:
                await one.receive(1, 0)
                await publish(backend, "t")
                few = connections(server)
            many = [backend.subscribe([f"{n}-{k}" for k in range(50)], f"w{n}") for n in range(40)]
            receives = [asyncio.create_task(each.receive(5, None)) for each in many]
            await all_asleep(many)
            tasks = [Task(key=f"{n}-{k}", id="t") for n in range(40) for k in range(5)]
            await asyncio.gather(*(backend.publisher.publish(task) for task in tasks))
            found = [received.deliveries for received in await asyncio.gather(*receives)]
            assert all(found)
            assert few <= connections(server) <= 3
        await until(lambda: connections(server) == 0, "all connections are closed")


async def test_a_reader_of_events_keeps_its_subscription(
    make_server: MakeServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U19, D8: a reader that waits for one event after another subscribes once, and reads the store once.

    The messages that wake it carry the events. Soon after its last wait nothing is subscribed.
    """
    with make_server() as server:
        async with opened(server.url, redis_prefix) as backend:
            signals, after = backend.streams._context.wakeups._signals, "1-1"
            await publish(backend, "t")
            async with backend.subscribe([KEY], "c") as subscription:
                (delivery,) = await take(subscription, 1)
                await backend.streams.append(new(delivery))
                before = calls(server)
                for first in range(1, 11):
                    reading = asyncio.create_task(
                        backend.streams.events(KEY, "t", after=after, wait=PATIENCE)
                    )
                    await until(lambda: bool(signals), "it waits")
                    await backend.streams.append(new(delivery, first, first=first))
                    page = await reading
                    assert page is not None
                    assert [event.value for event in page.events] == [b"%d" % first]
                    after = page.next or after
                    if first == 9:
                        monkeypatch.setattr(wakeups, "_LINGER", 0.0)
                spent = {name: n - before.get(name, 0) for name, n in calls(server).items()}
                assert spent["cmdstat_subscribe"] == 1
                assert spent.get("cmdstat_xrange", 0) <= 1
                kept = f"{{{redis_prefix}*:events:*"
                await until(lambda: not server.call("PUBSUB", "CHANNELS", kept), "none is left")


async def woken(receive: asyncio.Task[Received]) -> list[str]:
    """Return the task ids that a waiting receive delivers."""
    async with asyncio.timeout(PATIENCE):
        return [delivery.task.id for delivery in (await receive).deliveries]


async def test_no_wake_up_is_missed(redis_server: RedisServer, redis_prefix: str) -> None:
    """BUG-D5, fault E5: tasks published while the listener's connection is killed still wake the consumer.

    A receive that times out raises no error.
    """
    url = redis_server.url
    async with (
        opened(url, redis_prefix) as other,
        opened(url, redis_prefix) as backend,
        backend.subscribe([KEY], "c") as consumer,
    ):
        for n in range(12):
            receive = asyncio.create_task(consumer.receive(1, None))
            await until(lambda: consumer.asleep, "it waits")
            killing = asyncio.to_thread(kill_bells, redis_server)
            await asyncio.gather(killing, publish(other, f"t{n}"))
            assert await woken(receive) == [f"t{n}"]
        assert (await consumer.receive(1, 0.05)).deliveries == ()
        await until(lambda: backend._context.wakeups.works, "the bell works again")
        assert (await backend.health()).details["doorbell"] is True


def kill_bells(server: RedisServer) -> None:
    """Close only the connections that listen to pub/sub channels."""
    with server.connect() as connection:
        told = connection.call("CLIENT", "LIST", "TYPE", "pubsub").decode()
        for line in told.splitlines():
            fields = dict(word.partition("=")[::2] for word in line.split())
            connection.call("CLIENT", "KILL", "ID", fields["id"])


async def test_between_processes(redis_url: str, redis_prefix: str) -> None:
    """E1, A9, D11: a queue is created by its first task, whichever process publishes it.

    Of two processes that wait for the queue, only one gets the task.
    """
    async with (
        opened(redis_url, redis_prefix) as one,
        opened(redis_url, redis_prefix) as two,
        opened(redis_url, redis_prefix) as three,
    ):
        consumers = [backend.subscribe([KEY, "unknown"], "c") for backend in (one, two)]
        receives = [asyncio.create_task(each.receive(1, None)) for each in consumers]
        await all_asleep(consumers)
        await publish(three, "t")
        await asyncio.wait(receives, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        await publish(three, "u")
        found = [await woken(receive) for receive in receives]
        assert sorted(found) == [["t"], ["u"]]
        assert await three.control.queues() == ("unknown", KEY)


async def test_a_due_task_wakes_a_consumer(redis_url: str, redis_prefix: str) -> None:
    """D8, A11: a scheduled task wakes a waiting consumer at its due time, without polling before."""
    async with (
        opened(redis_url, redis_prefix) as other,
        opened(redis_url, redis_prefix) as backend,
        backend.subscribe([KEY], "c") as consumer,
    ):
        receive = asyncio.create_task(consumer.receive(1, None))
        await until(lambda: consumer.asleep, "it waits")
        at = backend.now() + 0.3
        await publish(other, "later", not_before=at + 60)
        await publish(other, "sooner", not_before=at)
        assert await woken(receive) == ["sooner"]
        assert at <= backend.now() < at + 60


async def test_a_receive_over_many_keys(redis_url: str, redis_prefix: str) -> None:
    """OPEN-E1, BUG-D1, D16: a receive over several queues takes exactly its limit, from all queues in turn.

    The most urgent task of each queue comes first.
    """
    async with opened(redis_url, redis_prefix) as backend:
        keys = [f"k{n}" for n in range(5)]
        for key in keys:
            await publish(backend, *"abc", key=key)
            await publish(backend, "urgent", key=key, priority=9)
        async with backend.subscribe(keys, "c") as consumer:
            first = (await consumer.receive(5, None)).deliveries
            assert {d.task.key for d in first} == set(keys)
            assert {d.task.id for d in first} == {"urgent"}
            assert len((await consumer.receive(1, None)).deliveries) == 1
            rest = await take(consumer, 14, limit=14)
            order = {key: [d.task.id for d in rest if d.task.key == key] for key in keys}
            assert all("abc".endswith("".join(ids)) for ids in order.values())
            assert (await consumer.receive(1, 0)).deliveries == ()


async def test_a_cancelled_wake_up_goes_to_another_consumer(
    redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A11, fault E4: a task wakes one of several waiting consumers; if that one is cancelled, it wakes another."""
    async with opened(redis_url, redis_prefix) as backend, opened(redis_url, redis_prefix) as other:
        consumers = [backend.subscribe([KEY], "c") for _ in range(3)]
        receives = [asyncio.create_task(each.receive(1, None)) for each in consumers]
        await all_asleep(consumers)
        wake = consumers[0].wake

        def wake_and_cancel(key: str | None) -> None:
            wake(key)
            receives[0].cancel()

        monkeypatch.setattr(consumers[0], "wake", wake_and_cancel)
        await publish(other, "t")
        done, _ = await asyncio.wait(receives[1:], timeout=PATIENCE, return_when="FIRST_COMPLETED")
        assert [len(receive.result().deliveries) for receive in done] == [1]
        assert receives[0].cancelled()
        await backend.aclose()  # ends every waiting receive without an error
        assert [len(receive.result().deliveries) for receive in receives[1:]] == [1, 0]
