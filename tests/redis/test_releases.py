"""Releasing deliveries, deliveries of several queues, large batches, closing, and durability classes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from taskqueue_core.capabilities import Durability, QueueSettings
from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    InvalidInput,
    LeaseLost,
    PublishUnconfirmed,
)
from taskqueue_core.loading import load_backend
from taskqueue_core.tasks import Settled, Task
from tests.redis.backends import KEY, keys_of, opened, publish, stream, take, until
from tests.redis.conftest import MakeServer
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer, wait_until

PAGE = Path(__file__).parents[2] / "docs/redis.md"


async def test_released_at_once(each_redis: RedisServer, redis_prefix: str) -> None:
    """D10, BUG-D1: released tasks are available at once, ahead of newer ones, and count no loss."""
    async with (
        opened(each_redis.url, redis_prefix, lease=60.0) as backend,
        opened(each_redis.url, redis_prefix, lease=60.0) as other,
    ):
        await publish(backend, *"abc")
        async with backend.subscribe([KEY], "one") as one, other.subscribe([KEY], "two") as two:
            held = await take(one, 3)
            await publish(backend, "d", "e")
            waiting = await take(two, 1)
            assert waiting[0].task.id == "d"
            assert await one.redeliver(held[2], held[0]) == (Settled.OK, Settled.OK)
            found = await take(two, 3)
            assert [d.task.id for d in found] == ["a", "c", "e"]
            assert {(d.attempt, d.losses) for d in found} == {(1, 0)}
            with pytest.raises(LeaseLost):
                await one.ack(held[0])
            await one.close()
            (last,) = await take(two, 1)
            assert (last.task.id, last.losses) == ("b", 0)
        stats = await backend.control.stats(KEY)
        assert (stats.lost, stats.redelivered) == (0, 8)


async def test_what_a_failover_gave_to_another(
    redis_server: RedisServer, redis_prefix: str
) -> None:
    """Law 2, fault C5: if a failover undid a delivery and another consumer got the task, the first cannot ack it."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await publish(backend, "a")
        async with backend.subscribe([KEY], "one") as one, backend.subscribe([KEY], "two") as two:
            (held,) = await take(one, 1)
            await two.join()
            fence, lane, *_ = held.receipt.split(".")
            name = stream(redis_prefix, lane)
            redis_server.call("XCLAIM", name, "g", two.token, 0, fence, "JUSTID")
            backend._context.receipts.mark_uncertain()
            with pytest.raises(LeaseLost):
                await one.ack(held)
            assert (await backend.control.ledger(KEY)).in_flight == 1


async def test_to_the_queue_it_came_from(redis_url: str, redis_prefix: str) -> None:
    """E2, A14: tasks of the same id in two queues are separate: each is settled, released and buried in its own."""
    async with opened(redis_url, redis_prefix) as backend:
        for key in ("left", "right"):
            await publish(backend, "same", "other", key=key)
        async with backend.subscribe(["left", "right"], "c") as both:
            held = {(d.task.key, d.task.id): d for d in await take(both, 4)}
            receipts = backend._context.receipts
            assert set(receipts.of(both)) == {d.receipt for d in held.values()}
            assert await both.ack(held.pop(("left", "same"))) == (Settled.OK,)
            assert set(receipts.of(both)) == {d.receipt for d in held.values()}
            assert await both.redeliver(held["right", "same"]) == (Settled.OK,)
            async with backend.subscribe(["left"], "c") as left:
                assert (await left.receive(1, 0)).deliveries == ()
            async with backend.subscribe(["right"], "c") as right:
                (again,) = await take(right, 1)
                assert (again.task.key, again.task.id) == ("right", "same")
                await right.dead_letter(again, "why")
            assert await backend.dead_letters.list("left") == ()
            assert len(await backend.dead_letters.list("right")) == 1
            rest = held["left", "other"], held["right", "other"]
            assert await both.ack(*rest) == (Settled.OK, Settled.OK)
            assert receipts.of(both) == []


async def test_more_than_a_batch(each_redis: RedisServer, redis_prefix: str) -> None:
    """D16, E6, law 1: calls with thousands of tasks are complete: all are published, released and settled."""
    tasks = [Task(key=KEY, id=f"t{n}") for n in range(9000)]
    async with opened(each_redis.url, redis_prefix) as backend:
        assert all(told.stored for told in await backend.publisher.publish(*tasks))
        async with backend.subscribe([KEY], "c") as consumer:
            for settle in (consumer.redeliver, consumer.ack):
                held = await take(consumer, 9000, limit=9000)
                assert set(await settle(*held)) == {Settled.OK}
        assert recounted(each_redis, redis_prefix)[KEY]["done"] == 9000


async def test_names_in_the_store(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """D13, D11: all Redis keys begin with the prefix.

    Creating a queue twice, or reading an unknown one, has no effect.
    """
    async with opened(redis_url, redis_prefix) as one, opened(redis_url, redis_prefix) as two:
        for backend in (one, two):
            async with backend.subscribe([KEY], "c") as consumer:
                await consumer.receive(1, 0)
        assert await one.control.ledger("never") == await two.control.ledger("never")
        assert await one.control.queues() == ()
        await publish(one, "a")
        for backend in (one, two):
            async with backend.subscribe([KEY], "c") as consumer:
                await consumer.redeliver(*await take(consumer, 1))
        groups = redis_server.call("XINFO", "GROUPS", stream(redis_prefix))
        assert len(groups) == 1
        assert await two.control.queues() == (KEY,)
    names = {name.split("}")[0] for name in keys_of(redis_server, redis_prefix)}
    assert names == {f"{{{redis_prefix}:0"}


async def test_nothing_is_left_behind(redis_url: str, redis_prefix: str) -> None:
    """A13, fault M7: a closed backend leaves no tasks and no threads, and closing it again raises no error."""
    before = asyncio.all_tasks(), threads()
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "now")
        await publish(backend, "t", not_before=time.time() + 60)
        async with backend.subscribe([KEY], "c") as holder:
            await take(holder, 1)
            assert set(backend._context.receipts._holders.values()) == {holder}
        assert not backend._context.receipts._holders
        assert await backend.control.purge(KEY) == 2
        await publish(backend, "u", not_before=time.time() + 60)
        consumers = [backend.subscribe([KEY], "c") for _ in range(3)]
        receives = [asyncio.create_task(each.receive(1, None)) for each in consumers]
        await until(lambda: all(each.asleep for each in consumers), "all wait")
    assert [(await receive).deliveries for receive in receives] == [(), (), ()]
    assert (asyncio.all_tasks(), threads()) == before
    await backend.aclose()


async def test_a_closed_backend(redis_url: str, redis_prefix: str) -> None:
    """A13: every call of a closed backend raises `BackendUnavailable`, also one that needs no store (fault M5)."""
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "t")
        async with backend.subscribe([KEY], "c") as consumer:
            (delivery,) = await take(consumer, 1)
    task = delivery.task
    calls: list[Callable[[], Awaitable[object]]] = [
        backend.publisher.publish,
        lambda: backend.publisher.publish(task),
        lambda: backend.publisher.schedule_retry(task, 1.0),
        lambda: backend.publisher.schedule_retry(task, 1.0, settles=delivery),
        lambda: backend.control.ledger(KEY),
        lambda: backend.dead_letters.discard(KEY),
        lambda: consumer.ack(delivery),
        lambda: consumer.redeliver(delivery),
        lambda: consumer.dead_letter(delivery, "why"),
    ]
    for call in calls:
        with pytest.raises(BackendUnavailable, match="the backend is closed"):
            await call()
    with pytest.raises(BackendUnavailable, match="the backend is closed"):
        backend.publisher.room_signal(KEY)


def threads() -> list[str]:
    """Return the names of our own threads; the event loop manages others."""
    return [thread.name for thread in threading.enumerate() if "taskqueue" in thread.name]


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"appendonly": "no"}, {"memory"}),
        ({"appendonly": "yes", "appendfsync": "everysec"}, {"memory", "process"}),
        ({"appendonly": "yes", "appendfsync": "always"}, {"memory", "process", "disk"}),
    ],
)
async def test_promises_are_checked(
    make_server: MakeServer, redis_prefix: str, config: dict[str, str], kept: set[str]
) -> None:
    """D17, fault B9: configuring a durability class that the server's settings do not provide is refused.

    The documentation has a table of what each class can lose.
    """
    with make_server(config=config) as server:
        async with opened(server.url, redis_prefix) as backend:
            for durability in Durability:
                settings = QueueSettings(durability=durability)
                key = f"q-{durability}"
                if durability in kept:
                    await backend.control.configure(key, settings)
                    await publish(backend, "t", key=key)
                else:
                    with pytest.raises(InvalidInput, match="one that this backend supports: "):
                        await backend.control.configure(key, settings)
    page = PAGE.read_text()
    for durability in Durability:
        assert re.search(rf"^\| `{durability}` \|[^|]*\| [^|]{{9,}} \|$", page, re.MULTILINE)


async def test_a_promise_that_is_kept_no_more(make_server: MakeServer, redis_prefix: str) -> None:
    """D17, fault B9: a process refuses to start if the store no longer provides the durability of a queue.

    The error names the queue and the remedy.
    """
    with make_server(aof=True) as server:
        async with opened(server.url, redis_prefix) as backend:
            await backend.control.configure(KEY, QueueSettings(durability=Durability.PROCESS))
            await publish(backend, "t")
        server.call("CONFIG", "SET", "appendonly", "no")
        async with opened(server.url, redis_prefix) as backend:
            with pytest.raises(
                ConfigurationError, match=f"queue '{KEY}'.*'process'.*appendonly yes"
            ):
                await backend.publisher.publish(Task(key=KEY, id="u"))
            async with backend.subscribe([KEY], "c") as consumer:
                with pytest.raises(ConfigurationError, match="appendonly yes"):
                    await consumer.receive(1, 0)


async def test_confirmed_by_replicas_or_not_at_all(
    make_server: MakeServer, redis_prefix: str
) -> None:
    """D17, fault C2: if the replica does not answer, a publish is unconfirmed.

    Sent again when the replica is back, it is confirmed.
    """
    with make_server(aof=True) as master:
        replica = make_server(aof=True, config={"replicaof": f"127.0.0.1 {master.port}"})
        with replica:
            await asyncio.to_thread(linked, master)
            async with opened(master.url, redis_prefix, answer_timeout=0.5) as backend:
                settings = QueueSettings(durability=Durability.REPLICATED)
                await backend.control.configure(KEY, settings)

                async def confirmed(task_id: str) -> bool:
                    with contextlib.suppress(PublishUnconfirmed):
                        told = await backend.publisher.publish(Task(key=KEY, id=task_id))
                        return told[0].stored
                    return False

                await until(lambda: confirmed("safe"), "it is confirmed")
                replica.freeze()
                with pytest.raises(PublishUnconfirmed) as raised:
                    await backend.publisher.publish(Task(key=KEY, id="unsafe"))
                assert raised.value.task_id == "unsafe"
                replica.thaw()
                await until(lambda: confirmed("unsafe"), "it is confirmed")
                assert (await backend.control.ledger(KEY)).published == 2
                assert replica.call("XLEN", stream(redis_prefix)) == 2


def linked(master: RedisServer) -> None:
    """Wait until the replica has loaded all data; its state is "online" even before that."""

    def in_step() -> bool:
        told = master.info("replication")
        return f"state=online,offset={told['master_repl_offset']}," in told.get("slave0", "")

    wait_until(in_step, "a replica")


def test_a_stronger_store_can_be_plugged_in() -> None:
    """D17: backends are loaded by name or path, so that one with stronger durability can replace this one."""
    for word in ("redis", "taskqueue_redis:create_backend"):
        backend = load_backend(word)
        assert backend.capabilities.durable
        assert backend.capabilities.shared
