"""A maintenance pass of the Redis backend: it is bounded, reaches every queue, and changes nothing too early."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Published, Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, publish, stream, take
from tests.redis.recount import recounted
from tests.redis.servers import RedisServer

KEYS = tuple(f"{KEY}{n}" for n in range(3))
WINDOW = 300.0
"""default number of seconds for which a queue remembers the ids of ended tasks"""


@pytest.fixture
def clock() -> ManualClock:
    """A manual clock that gives the backend its time."""
    return ManualClock(1_700_000_000.0)


@pytest.fixture
async def backend(
    redis_url: str, redis_prefix: str, clock: ManualClock
) -> AsyncIterator[RedisBackend]:
    """A backend whose maintenance runs only when a test calls it."""
    async with opened(redis_url, redis_prefix, clock=clock, lease=60.0) as backend:
        yield backend


async def command(backend: RedisBackend, *words: Any) -> Any:
    """Run a Redis command directly; words that start with a colon become keys of the partition."""
    (name,) = backend._context.scripts.partitions.names
    told = (f"{name}{word}" if str(word).startswith(":") else word for word in words)
    return await backend._context.client.command(name, *told)


async def figures(backend: RedisBackend, budget: int) -> list[int]:
    """Run one maintenance pass; return how many tasks it promoted, expired, forgot and recovered."""
    (name,) = backend._context.scripts.partitions.names
    words = 60_000_000, 10_000_000, budget, 60_000, "tests"
    promoted, expired, forgotten, recovered, *_ = await backend._context.scripts.run(
        "maintain", name, *words
    )
    return [promoted, len(expired), forgotten, recovered]


async def fallen_silent(backend: RedisBackend, token: str) -> None:
    """Make the store believe that a consumer has been silent for longer than its lease."""
    backend._context.heartbeat.remove(token)
    await command(backend, "ZADD", ":alive", "XX", 1, token)
    await command(backend, "HSET", ":meta", "armed", 1)


@pytest.mark.parametrize("what", ["promoted", "expired", "forgotten", "results", "recovered"])
async def test_a_pass_is_bounded(
    backend: RedisBackend,
    redis_server: RedisServer,
    redis_prefix: str,
    clock: ManualClock,
    what: str,
) -> None:
    """A17, law 8: a pass handles at most ``budget`` tasks; several passes handle all tasks of all queues (fault M5)."""
    ids, now = [f"t{n}" for n in range(5)], clock.now()
    times = {"promoted": {"not_before": now + 5}, "expired": {"deadline": now + 5}}.get(what, {})
    for key in KEYS:
        await publish(backend, *ids, key=key, **times)
        if what == "results":
            await backend.control.configure(key, QueueSettings(result_ttl=2 * WINDOW))
    dies = backend.subscribe(KEYS, "dies")
    if what in {"forgotten", "results", "recovered"}:
        taken = await take(dies, 15)
        if what != "recovered":
            await dies.ack(*taken, results=[b"1" if what == "results" else None] * 15)
    assert await figures(backend, 4) == [0, 0, 0, 0]
    if what == "recovered":
        await fallen_silent(backend, dies.token)
    elif what == "results":
        await clock.advance(WINDOW + 1)
        assert [(await figures(backend, 4))[2] for _ in range(4)] == [0, 0, 0, 0]
        await clock.advance(WINDOW)
    else:
        await clock.advance(5 if what in {"promoted", "expired"} else WINDOW)
    place = ["promoted", "expired", "forgotten", "recovered"].index(
        "forgotten" if what == "results" else what
    )
    passes = [await figures(backend, 4) for _ in range(6)]
    numbers = [told[place] for told in passes]
    if what == "recovered":  # the lanes of a consumer without deliveries count as well
        assert max(numbers) == 4
    else:
        assert numbers == [4, 4, 4, 3, 0, 0]
    assert sum(map(sum, passes)) == 15
    books = recounted(redis_server, redis_prefix)
    for key in KEYS:
        statuses = await backend.control.statuses(key, *ids)
        if place == 2:
            assert statuses == (None,) * 5
            assert books[key]["done"] == 5
            assert await command(backend, "EXISTS", f":q:{key}/t") == 0
            assert await command(backend, "EXISTS", f":q:{key}/o") == 0
        else:
            assert [status and status.losses for status in statuses] == [int(place == 3)] * 5
    await dies.close()


async def test_what_is_remembered(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, clock: ManualClock
) -> None:
    """Law 7: the id of an ended task is remembered exactly for the window, also if the window is changed (fault M5)."""
    await publish(backend, "a", "b", "c", "again")
    async with backend.subscribe([KEY], "c") as consumer:
        a, b, c, again = await take(consumer, 4)
        await consumer.ack(a, again)
        await clock.advance(100)
        await consumer.ack(b)
        await backend.publisher.schedule_retry(again.task, clock.now() + 1000)
        await clock.advance(WINDOW - 100.001)
        assert await figures(backend, 100) == [0, 0, 0, 0]
        await clock.advance(0.001)
        # The pass forgets "a", but not "again", whose retry is scheduled.
        assert await figures(backend, 100) == [0, 0, 1, 0]
        known = await backend.control.statuses(KEY, "a", "b", "c", "again")
        assert [status is None for status in known] == [True, False, False, False]
        recounted(redis_server, redis_prefix)
        await backend.control.configure(KEY, QueueSettings(dedupe_window=1000))
        recounted(redis_server, redis_prefix)
        await clock.advance(500)
        assert await figures(backend, 100) == [0, 0, 0, 0]
        await consumer.ack(c)
        await clock.advance(300)
        assert await figures(backend, 100) == [1, 0, 1, 0]
        assert await backend.control.statuses(KEY, "b") == (None,)
        recounted(redis_server, redis_prefix)


async def test_results_have_times_of_their_own(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, clock: ManualClock
) -> None:
    """Law 7, A17: a result expires independently of the deduplication window and of a later retry (fault M5)."""
    await publish(backend, "a", "b", "again")
    async with backend.subscribe([KEY], "c") as consumer:
        for delivery in await take(consumer, 3):
            settings = await backend.control.settings(KEY)
            ttl = {"a": 100.0, "b": 400.0, "again": 500.0}[delivery.task.id]
            await backend.control.configure(KEY, settings.model_copy(update={"result_ttl": ttl}))
            await consumer.ack(delivery, results=[b"1"])
        await backend.publisher.schedule_retry(delivery.task, clock.now() + 1000)
        for step, results, forgotten, left in (
            (100, [None, b"1", b"1"], 0, [False, False, False]),
            (200, [None, b"1", b"1"], 1, [True, False, False]),
            (100, [None, None, b"1"], 1, [True, True, False]),
            (100, [None, None, None], 0, [True, True, False]),
        ):
            await clock.advance(step)
            assert await figures(backend, 100) == [0, 0, forgotten, 0], step
            assert [*await backend.control.results(KEY, "a", "b", "again")] == results
            known = await backend.control.statuses(KEY, "a", "b", "again")
            assert [status is None for status in known] == left
            recounted(redis_server, redis_prefix)


async def test_a_window_that_grows_while_a_result_is_kept(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, clock: ManualClock
) -> None:
    """A17: a record kept for its result is forgotten according to a window that has become longer (fault M5).

    The first pass looks at one of two tasks that ended at the same time, so that only the other one stays in the list.
    """
    await backend.control.configure(KEY, QueueSettings(result_ttl=400))
    await publish(backend, "t", "u")
    async with backend.subscribe([KEY], "c") as consumer:
        await consumer.ack(*await take(consumer, 2), results=[b"1", None])
    for step, window, budget, forgotten in (
        (WINDOW, 1000, 1, 0),
        (100, None, 100, 0),
        (599.9, None, 100, 0),
        (0.1, None, 100, 2),
    ):
        await clock.advance(step)
        assert (await figures(backend, budget))[2] == forgotten
        recounted(redis_server, redis_prefix)
        if window:
            settings = await backend.control.settings(KEY)
            longer = settings.model_copy(update={"dedupe_window": window})
            await backend.control.configure(KEY, longer)


async def test_anomalies_are_logged_once(
    backend: RedisBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """E6: repaired entries are logged when they are found, and not again with each pass (fault M5)."""
    for told in range(3):
        if told:
            await command(backend, "HINCRBY", ":meta", "anomalies", 1)
        for _ in range(2):
            await backend.control.maintain()
        lines = [line for line in caplog.messages if "inconsistent entries repaired so far" in line]
        assert len(lines) == told


async def test_a_publish_that_is_refused_changes_nothing(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, clock: ManualClock
) -> None:
    """Law 6, A17: a refused publish of an ended id does not change when its result and its record expire (fault M5)."""
    await backend.control.configure(KEY, QueueSettings(result_ttl=400))
    await publish(backend, "t")
    async with backend.subscribe([KEY], "c") as consumer:
        (delivery,) = await take(consumer, 1)
        await consumer.ack(delivery, results=[b"1"])
    await clock.advance(WINDOW + 1)
    await backend.control.maintain()
    settings = await backend.control.settings(KEY)
    full = settings.model_copy(update={"capacity": 1})
    full = await backend.control.configure(KEY, full)
    await publish(backend, "other")
    await backend.control.configure("door", QueueSettings(bound_to=(KEY,)))
    for key in (KEY, "door"):
        (told,) = await backend.publisher.publish(Task(key=key, id="t"))
        assert told.status is Published.REFUSED
        assert await backend.control.results(KEY, "t") == (b"1",)
        recounted(redis_server, redis_prefix)
    await backend.control.configure(KEY, full.model_copy(update={"capacity": 2}))
    await publish(backend, "t", key="door")
    assert await backend.control.results(KEY, "t") == (None,)
    recounted(redis_server, redis_prefix)


async def in_steps(
    backend: RedisBackend, meanwhile: Callable[[], Awaitable[object]], script: str, *words: str
) -> list[int]:
    """Run a script in steps of four tasks until it is done; return each step's count.

    ``meanwhile`` runs after the first step.
    """
    (name,) = backend._context.scripts.partitions.names
    steps, over, upto = list[int](), 0, b""
    while not over:
        number, over, upto, *_ = await backend._context.scripts.run(
            script, name, KEY, *words, upto, 4
        )
        if not steps:
            await meanwhile()
        steps.append(number)
    return steps


@pytest.mark.parametrize("entity", [None, "e"])
async def test_a_purge_goes_in_steps(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, entity: str | None
) -> None:
    """A17, law 1: a purge cancels tasks in bounded steps, and none that were published after it began (fault M5)."""
    await publish(backend, "r0", "r1", "r2", "held", priority=4)
    async with backend.subscribe([KEY], "c") as consumer:
        taken = await take(consumer, 4)
        await consumer.redeliver(*taken[:3])
        await publish(backend, *(f"a{n}" for n in range(5)), priority=7, ordering_key=entity)
        await publish(backend, *(f"b{n}" for n in range(5)), tenant="t")
        at = backend.now() + 1000
        await publish(backend, *(f"d{n}" for n in range(5)), not_before=at, ordering_key=entity)

        async def meanwhile() -> None:
            await publish(backend, "new", "later", priority=9)

        steps = await in_steps(backend, meanwhile, "purge")
        assert (sum(steps), max(steps)) == (18, 4)
        books = recounted(redis_server, redis_prefix)[KEY]
        assert (books["waiting"], books["in_flight"], books["cancelled"]) == (2, 1, 18)
        assert [one.task.id for one in await take(consumer, 2)] == ["new", "later"]


@pytest.mark.parametrize("verb", ["redrive", "discard"])
async def test_the_dead_move_in_steps(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str, verb: str
) -> None:
    """A17, law 1: dead letters are moved in bounded steps, and none that died after the call began (fault M5)."""
    await publish(backend, *(f"t{n}" for n in range(11)))
    async with backend.subscribe([KEY], "c") as consumer:
        *first, last = await take(consumer, 11)
        for delivery in first:
            await consumer.dead_letter(delivery, "why")

        async def meanwhile() -> None:
            await consumer.dead_letter(last, "why")

        assert await in_steps(backend, meanwhile, "redrive", verb) == [4, 4, 2]
        books = recounted(redis_server, redis_prefix)[KEY]
        assert (books["dead"], books["waiting"]) == (1, 10 if verb == "redrive" else 0)


async def test_strangers_in_the_groups(
    redis_url: str, redis_prefix: str, clock: ManualClock
) -> None:
    """E6: an unknown member of a consumer group is removed if it has no deliveries and was idle for long (fault M5)."""
    async with opened(redis_url, redis_prefix, clock=clock, lease=60.0) as backend:
        await publish(backend, "t0", "t1", "t2")
        name = stream(redis_prefix)
        async with backend.subscribe([KEY], "c") as known, backend.subscribe([KEY], "c") as rests:
            await take(known, 1)
            await rests.ack(*await take(rests, 1))
            await command(backend, "XREADGROUP", "GROUP", "g", "has", "STREAMS", name, ">")
            await command(backend, "XGROUP", "CREATECONSUMER", name, "g", "idle")

            async def members(idle: int) -> set[bytes]:
                (partition,) = backend._context.scripts.partitions.names
                words = 60_000_000, 10_000_000, 100, idle, "tests"
                await backend._context.scripts.run("maintain", partition, *words)
                told = await command(backend, "XINFO", "CONSUMERS", name, "g")
                return {member[1] for member in told}

            everybody = {known.token.encode(), rests.token.encode(), b"has", b"idle"}
            assert await members(60_000) == everybody
            assert await members(-1) == everybody - {b"idle"}
