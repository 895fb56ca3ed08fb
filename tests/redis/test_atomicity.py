"""State changes are atomic: with a full store, with damaged entries, and when moving tasks to the dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Published, Settled, State, Task
from taskqueue_redis import RedisBackend, publisher
from taskqueue_redis.scripts.task_codec import encode
from tests.chaos.proxy import FaultProxy
from tests.redis.backends import KEY, fall_silent, opened, publish, stream, take, until
from tests.redis.conftest import MakeServer
from tests.redis.engines import Engine
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

VERBS = ["ack", "result", "redeliver", "lose", "bury", "retry", "progress", "close"]


async def test_a_store_without_memory(
    make_server: MakeServer, each_engine: Engine, redis_prefix: str
) -> None:
    """E6, BUG-D4, fault B8: if Redis is out of memory, a publish is refused with a reason, and all other verbs work.

    A refused publish changes nothing, and the queue can be drained, on each engine.
    """
    with make_server(each_engine) as server:
        async with opened(server.url, redis_prefix) as backend:
            await publish(backend, *VERBS, *(f"more{n}" for n in range(50)))
            await publish(backend, "later", not_before=backend.now() + 3600)
            async with backend.subscribe([KEY], "dies") as dies:
                (dead,) = await take(dies, 1)
                await dies.dead_letter(dead, "before")
            server.call("CONFIG", "SET", "maxmemory", "1")
            before = recounted(server, redis_prefix)
            (told,) = await backend.publisher.publish(Task(key=KEY, id="x"))
            (other,) = await backend.publisher.publish(Task(key="new", id="x"))
            for answer in (told, other):
                assert answer.status is Published.REFUSED
                assert answer.reason == "the store has no memory left"
                assert answer.retry_after
            assert recounted(server, redis_prefix) == before
            await without_memory(backend)
            recounted(server, redis_prefix)
            async with backend.subscribe([KEY], "c") as consumer:
                while deliveries := (await consumer.receive(20, 0)).deliveries:
                    await consumer.ack(*deliveries)
            ledger = await backend.control.ledger(KEY)
            assert (ledger.waiting, ledger.in_flight, ledger.balanced) == (0, 0, True)
            recounted(server, redis_prefix)
            server.call("CONFIG", "SET", "maxmemory", "0")
            await publish(backend, "x")


async def without_memory(backend: RedisBackend) -> None:
    """Call every operation except publish."""
    control = backend.control
    async with backend.subscribe([KEY], "worker") as one, backend.subscribe([KEY], "worker") as two:
        held = {d.task.id: d for d in await take(one, 12)}
        result, ack = held.pop("result"), list(held.values())
        assert await one.ack(result, results=[b'"r"']) == (Settled.OK,)
        assert await control.results(KEY, "result") == (b'"r"',)
        assert await one.ack(ack[0]) == (Settled.OK,)
        assert await one.redeliver(ack[1]) == (Settled.OK,)
        assert await one.redeliver(ack[2], lost=True) == (Settled.OK,)
        assert await one.dead_letter(ack[3], "why", "error") is Settled.OK
        at = backend.now() + 60
        told = await backend.publisher.schedule_retry(ack[4].task, at, settles=ack[4], error="e")
        assert told.status is Published.ACCEPTED
        told = await backend.publisher.schedule_retry(Task(key=KEY, id=ack[5].task.id), at)
        assert told.status is Published.ACCEPTED
        assert await control.progress(ack[6], 0.5)
        (adopted,) = await two.adopt(ack[7].receipt)
        assert adopted is not None
        assert await two.ack(adopted) == (Settled.OK,)
        assert await control.cancel(KEY, "later")
        assert await control.cancel(KEY, ack[8].task.id)
        settings = await control.settings(KEY)
        await control.configure(KEY, settings.model_copy(update={"max_losses": 1}))
        assert await backend.dead_letters.redrive(KEY, ack[3].task.id) == 1
        assert await backend.dead_letters.discard(KEY) == 1
        await control.maintain()
        assert (await control.stats(KEY)).lost == 1
    # Closing the two subscriptions has released their deliveries.
    assert (await control.ledger(KEY)).in_flight == 0
    assert await control.workers() == ()


async def test_maintenance_without_memory(make_server: MakeServer, redis_prefix: str) -> None:
    """Fault B8: without memory, heartbeats, promotions, purges and the query for lost deliveries work (fault M5)."""
    clock = ManualClock(1_700_000_000.0)
    with make_server() as server:
        async with opened(server.url, redis_prefix, clock=clock, lease=60.0) as backend:
            (name,), run = backend._context.scripts.partitions.names, backend._context.scripts.run
            await publish(backend, "due", not_before=clock.now() + 1)
            await publish(backend, "a", "b", key="other")
            await publish(backend, *(f"t{n}" for n in range(1100)), key="many")
            async with backend.subscribe([KEY], "c") as consumer:
                await consumer.receive(1, 0)
                server.call("CONFIG", "SET", "maxmemory", "1")
                assert await run("beat", name, consumer.token, "unknown") == [b"unknown"]
                assert await run("pending", name, consumer.token, 7, "", "", 9) == [[], []]
                await clock.advance(2)
                assert await run("promote", name, 10) == [1, b""]
                assert await backend.control.purge("other") == 2
                await backend.control.configure("many", QueueSettings(order=Order.FAIR))
                books = recounted(server, redis_prefix)
                assert [books[key]["waiting"] for key in (KEY, "other", "many")] == [1, 0, 1100]


async def test_what_falls_due_does_not_lift_the_limit(
    make_server: MakeServer, redis_prefix: str
) -> None:
    """Fault B8: without memory, a publish is refused even after a task fell due, or for an id that may be reused."""
    clock = ManualClock(1_700_000_000.0)
    with make_server() as server:
        async with opened(server.url, redis_prefix, clock=clock) as backend:
            await publish(backend, "due", not_before=clock.now() + 1)
            await publish(backend, "again")
            async with backend.subscribe([KEY], "c") as consumer:
                await consumer.ack(*await take(consumer, 1), results=[b"1"])
            await clock.advance(301)
            server.call("CONFIG", "SET", "maxmemory", "1")
            for name in ("new", "again"):
                (told,) = await backend.publisher.publish(Task(key=KEY, id=name))
                assert told.status is Published.REFUSED
            recounted(server, redis_prefix)


def damaged(task: Task) -> bytes:
    """Return the encoded task, with one bit flipped if its id begins with "bad"."""
    body = encode(task)
    place = len(body) // 2
    if not task.id.startswith("bad"):
        return body
    return body[:place] + bytes([body[place] ^ 4]) + body[place + 1 :]


async def dead(backend: RedisBackend, number: int) -> dict[str, str]:
    """Wait until ``number`` tasks are dead, and return their reasons by id."""

    async def enough() -> bool:
        return len(await backend.dead_letters.list(KEY)) >= number

    await until(enough, f"{number} dead letters")
    return {letter.task.id: letter.reason for letter in await backend.dead_letters.list(KEY)}


async def test_damaged_bodies_are_never_executed(
    each_redis: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault B6: a task whose body has a flipped bit is found by its checksum and moved to the dead letters.

    This holds for fresh, returned, promoted, adopted and redriven tasks, and after a lost answer.
    """
    monkeypatch.setattr(publisher, "encode", damaged)
    async with (
        FaultProxy(("127.0.0.1", each_redis.port)) as proxy,
        opened(each_redis.url, redis_prefix) as backend,
        opened(f"redis://127.0.0.1:{proxy.address[1]}", redis_prefix) as other,
        other.subscribe([KEY], "c") as consumer,
    ):
        payload: Any = {"payload": b'{"pay": "load"}'}
        await publish(backend, "bad-fresh", "good-fresh", **payload)
        assert [d.task.id for d in await take(consumer, 1, limit=9)] == ["good-fresh"]
        assert await dead(backend, 1) == {"bad-fresh": "corrupt"}
        assert await backend.dead_letters.redrive(KEY) == 1
        await publish(backend, "bad-later", not_before=backend.now() + 0.05, **payload)
        await publish(backend, "good-later", not_before=backend.now() + 0.05, **payload)
        assert [d.task.id for d in await take(consumer, 1, limit=9)] == ["good-later"]
        assert await dead(backend, 2) == dict.fromkeys(["bad-fresh", "bad-later"], "corrupt")
        await publish(backend, "bad-unseen", "good-unseen", **payload)
        proxy.lose_replies(1, after=b"EVALSHA")
        with pytest.raises(Exception, match="response was lost"):
            await consumer.receive(9, 0)
        assert [d.task.id for d in await take(consumer, 1, limit=9)] == ["good-unseen"]
        assert len(await dead(backend, 3)) == 3
        (letter, *_) = await backend.dead_letters.list(KEY)
        assert letter.task.value().startswith("010000")  # the raw bytes, for inspection
        assert recounted(each_redis, redis_prefix)[KEY]["dead"] == 3


async def test_a_parked_body_that_is_changed_by_hand(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """Fault B6: a stored body that was changed, shortened or removed by hand moves its task to the dead letters."""
    changes: list[Callable[[bytes], bytes]] = [
        lambda body: body[:-1] + bytes([body[-1] ^ 1]),
        lambda body: body[:4],
        lambda _: b"",
    ]
    async with opened(redis_url, redis_prefix) as backend:
        ids = [f"t{n}" for n in range(len(changes))]
        await publish(backend, *ids, "good", payload=b'"text"')
        async with backend.subscribe([KEY], "c") as consumer:
            await consumer.redeliver(*await take(consumer, len(ids) + 1))
            bodies = f"{{{redis_prefix}:0}}:q:{KEY}/b"
            for name, change in zip(ids, changes, strict=True):
                body = redis_server.call("HGET", bodies, name)
                redis_server.call("HSET", bodies, name, change(body))
            (good,) = await take(consumer, 1, limit=9)
            assert good.task.id == "good"
            await consumer.ack(good)
            assert await dead(backend, len(ids)) == dict.fromkeys(ids, "corrupt")
        assert recounted(redis_server, redis_prefix)[KEY]["in_flight"] == 0


@pytest.mark.parametrize("name", ["x", "", b"\xff\xfe", "not a name", "x" * 300])
async def test_entries_that_were_never_published(
    each_redis: RedisServer, redis_prefix: str, name: str | bytes
) -> None:
    """E6, rule 10: a stream entry without a body and a record is removed, and delays no other task."""
    async with opened(each_redis.url, redis_prefix) as backend:
        async with backend.subscribe([KEY], "c") as consumer:
            for limit in (1, 9):
                await publish(backend, f"a-{limit}")
                told = each_redis.call("XINFO", "STREAM", stream(redis_prefix))
                last = told[told.index(b"last-generated-id") + 1].decode()
                each_redis.call("XADD", stream(redis_prefix), f"{int(last[:-2]) + 1}-0", name, "")
                await publish(backend, f"b-{limit}")
                found = await take(consumer, 2, limit=limit)
                assert [d.task.id for d in found] == [f"a-{limit}", f"b-{limit}"]
                await consumer.ack(*found)
            await until(lambda: gone(each_redis, redis_prefix), "the entries are gone")
            assert (await consumer.receive(1, 0)).deliveries == ()
        ledger = await backend.control.ledger(KEY)
        assert (ledger.done, ledger.waiting, ledger.in_flight) == (4, 0, 0)
        assert (await backend.health()).details["anomalies"]
        recounted(each_redis, redis_prefix)


def gone(server: RedisServer, prefix: str) -> bool:
    """Return whether the stream is empty."""
    return int(server.call("XLEN", stream(prefix))) == 0


async def test_one_at_a_time_past_damaged_ones(
    redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault B6, BUG-D5: a consumer that takes one task at a time gets the tasks behind damaged ones at once."""
    monkeypatch.setattr(publisher, "encode", damaged)
    async with opened(redis_url, redis_prefix) as backend:
        await publish(backend, "bad-1", "bad-2", "good-3", "bad-4", "good-5")
        async with backend.subscribe([KEY], "c") as consumer:
            found = await take(consumer, 2, limit=1)
            assert [d.task.id for d in found] == ["good-3", "good-5"]
        assert set(await dead(backend, 3)) == {"bad-1", "bad-2", "bad-4"}


async def test_the_way_to_the_dead_letters(each_redis: RedisServer, redis_prefix: str) -> None:
    """BUG-D4, D12, E2: a task that dies is only among the dead letters of its own queue.

    Its stream entry is removed, whichever way it died.
    """
    async with opened(each_redis.url, redis_prefix) as backend:
        for key in ("one", "two"):
            settings = await backend.control.settings(key)
            await backend.control.configure(key, settings.model_copy(update={"max_losses": 0}))
            await publish(backend, "t", "given-up", key=key)
        async with backend.subscribe(["one", "two"], "c") as consumer:
            for delivery in await take(consumer, 4):
                if delivery.task.id == "t":
                    assert await consumer.redeliver(delivery, lost=True) == (Settled.DEAD,)
                else:
                    assert await consumer.dead_letter(delivery, "why") is Settled.OK
        books = recounted(each_redis, redis_prefix)
        for key in ("one", "two"):
            assert books[key]["dead"] == 2
            assert each_redis.call("XLEN", stream(redis_prefix, key=key)) == 0
            letters = await backend.dead_letters.list(key)
            assert {(letter.task.key, letter.task.id, letter.reason) for letter in letters} == {
                (key, "t", "max_losses_exceeded"), (key, "given-up", "why"),
            }  # fmt: skip
        assert await backend.dead_letters.redrive("one") == 2
        assert (await backend.control.ledger("one")).waiting == 2
        assert (await backend.control.ledger("two")).dead == 2


async def test_settling_frees_the_entry(each_redis: RedisServer, redis_prefix: str) -> None:
    """A17, BUG-D4: acking a batch runs one script, which removes its stream entries and pending entries."""
    async with opened(each_redis.url, redis_prefix, lease=60.0) as backend:
        await publish(backend, *(f"t{n}" for n in range(500)))
        async with backend.subscribe([KEY], "c") as consumer:
            deliveries = await take(consumer, 500)
            name = stream(redis_prefix)
            assert each_redis.call("XPENDING", name, "g")[0] == 500
            before = scripts_run(each_redis)
            assert set(await consumer.ack(*deliveries)) == {Settled.OK}
            assert scripts_run(each_redis) == before + 1
            assert each_redis.call("XLEN", name) == 0
            assert each_redis.call("XPENDING", name, "g")[0] == 0


def scripts_run(server: RedisServer) -> int:
    """Return how many scripts the server has run."""
    text = server.info("commandstats").get("cmdstat_evalsha", "calls=0,")
    return int(text.split(",")[0].removeprefix("calls="))


async def test_memory_comes_back(make_server: MakeServer, redis_prefix: str) -> None:
    """BUG-D4, A17: memory of acked tasks is freed once their deduplication window has passed."""
    clock = ManualClock(1_700_000_000.0)
    with make_server(aof=False) as server:
        async with opened(server.url, redis_prefix, clock=clock, lease=60.0) as backend:
            async with backend.subscribe([KEY], "c") as consumer:
                used: list[int] = []
                for turn in range(3):
                    await publish(backend, *(f"{turn}-{n}" for n in range(4000)))
                    full = memory(server)
                    for _ in range(4):
                        await consumer.ack(*await take(consumer, 1000))
                    await clock.advance(301)
                    while (await backend.control.maintain()).forgotten:
                        pass
                    used.append(memory(server))
                    assert full > used[-1] + 400_000
            assert used[2] <= used[0] * 1.1 < 10_000
            assert (await backend.control.ledger(KEY)).done == 12_000
            assert await backend.control.statuses(KEY, "0-0") == (None,)


def memory(server: RedisServer) -> int:
    """Return the bytes that Redis uses for its keys."""
    with server.connect() as connection:
        keys = connection.call("KEYS", "*")
        return sum(connection.pipeline([("MEMORY", "USAGE", key, "SAMPLES", 0) for key in keys]))


async def test_nothing_is_trimmed(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """D15: thousands of tasks that are published and acked leave an older delivery in flight untouched.

    When its consumer dies, it is redelivered with its body.
    """
    async with opened(redis_url, redis_prefix) as backend, opened(redis_url, redis_prefix) as other:
        await publish(backend, "long", payload=b'"body"')
        slow = other.subscribe([KEY], "slow")
        await take(slow, 1)
        async with backend.subscribe([KEY], "quick") as quick:
            for turn in range(3):
                await publish(backend, *(f"{turn}-{n}" for n in range(1000)))
                await quick.ack(*await take(quick, 1000))
            assert redis_server.call("XLEN", stream(redis_prefix)) == 1
            await fall_silent(redis_server, other, slow.token)
            await backend.control.maintain()
            (found,) = await take(quick, 1)
            assert (found.task.id, found.task.payload, found.losses) == ("long", b'"body"', 1)
            await quick.ack(found)
        (status,) = await backend.control.statuses(KEY, "long")
        assert status is not None
        assert status.state is State.DONE


async def test_many_take_at_the_same_moment(each_redis: RedisServer, redis_prefix: str) -> None:
    """FIX-C2, A9, D8: if eight backends receive concurrently, each task is delivered to exactly one of them."""
    url, ids = each_redis.url, [f"t{n}" for n in range(400)]

    async def work(backend: RedisBackend, seen: list[Any]) -> None:
        async with backend.subscribe([KEY], "same") as consumer:
            while deliveries := (await consumer.receive(3, 0)).deliveries:
                seen += [(d.task.id, consumer.token) for d in deliveries]
                await consumer.ack(*deliveries)

    async with opened(url, redis_prefix) as backend:
        await publish(backend, *ids)
        others = [RedisBackend(settings=backend._context.settings) for _ in range(8)]
        seen: list[Any] = []
        await asyncio.gather(*(work(other, seen) for other in others))
        assert sorted(name for name, _ in seen) == sorted(ids)
        assert len({token for _, token in seen}) == 8
        for other in others:
            await other.aclose()
