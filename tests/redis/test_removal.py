"""Queues leave the store: idle ones after their `queue_ttl`, others when they are deleted; and erased tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from taskqueue_core.capabilities import Order, QueueSettings
from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import QueueInUse
from taskqueue_core.limits import LIMITS
from taskqueue_core.rate_limit import RateLimit
from taskqueue_core.tasks import Published, State, Task
from taskqueue_core.uniqueness import UniqueKey
from taskqueue_redis import RedisBackend
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.servers import RedisServer

TTL = QueueSettings().queue_ttl
ENDED = 4000.0
"""seconds after which records and results have expired"""


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


@pytest.fixture
def stored(redis_server: RedisServer, redis_prefix: str) -> Stored:
    """The keys of the test's backend."""
    return Stored(redis_server, redis_prefix)


class Stored:
    """The keys in Redis with the prefix of a test."""

    def __init__(self, server: RedisServer, prefix: str) -> None:
        self._server, self._prefix = server, prefix

    def keys(self, *names: str) -> set[str]:
        """Return the parts of the keys after the partition's name; with ``names``, only keys that contain one."""
        found, cursor = set[str](), b"0"
        while True:
            cursor, some = self._server.call(
                "SCAN", cursor, "MATCH", f"{{{self._prefix}:*", "COUNT", 1000
            )
            found |= {key.decode().partition("}")[2] for key in some}
            if cursor == b"0":
                break
        return {key for key in found if not names or any(name in key for name in names)}

    def naming(self, text: str) -> set[str]:
        """Return the keys that contain a text, in their names or their values."""
        read = {
            "string": ("GET",), "hash": ("HGETALL",), "set": ("SMEMBERS",), "stream": ("XRANGE", "-", "+"),
            "zset": ("ZRANGE", "0", "-1"), "list": ("LRANGE", "0", "-1"),
        }  # fmt: skip
        found = self.keys(text)
        for key in self.keys():
            name = f"{{{self._prefix}:0}}{key}"
            command, *rest = read[self._server.call("TYPE", name)]
            if text in repr(self._server.call(command, name, *rest)):
                found.add(key)
        return found

    def bytes(self) -> int:
        """Return the memory that all keys take."""
        return sum(
            self._server.call("MEMORY", "USAGE", f"{{{self._prefix}:0}}{key}", "SAMPLES", 0)
            for key in self.keys()
        )


async def maintain(backend: RedisBackend) -> int:
    """Run maintenance until it finds nothing to do; return how many queues were removed."""
    removed = 0
    while True:
        done = await backend.control.maintain()
        removed += done.removed
        if not (done.removed or done.forgotten or done.promoted):
            return removed


async def end_all(backend: RedisBackend, *keys: str) -> None:
    """Deliver and settle everything in these queues, each end in another way, with results and progress."""
    subscription = backend.subscribe(keys, "w")
    for delivery in await take(subscription, 2 * len(keys)):
        await backend.control.progress(delivery, 0.5)
        if delivery.task.id == "acked":
            await subscription.ack(delivery, results=[b"1"])
        else:
            await subscription.dead_letter(delivery, "broken", "error")
    await subscription.close()
    for key in keys:
        await backend.dead_letters.discard(key)
        await backend.control.purge(key)


async def filled(backend: RedisBackend, clock: ManualClock, *keys: str, tenant: str = "a") -> None:
    """Publish tasks of every kind in these queues."""
    now = clock.now()
    for key in keys:
        await publish(backend, "acked", "dead", key=key, tenant=tenant, deadline=now + 9e5)
        await publish(backend, "later", key=key, tenant=tenant, not_before=now + 3600, priority=7)


async def test_idle_queues_leave_nothing(
    backend: RedisBackend, clock: ManualClock, stored: Stored
) -> None:
    """A8: idle and empty queues are removed; after many names, the store has the keys and bytes that it had before."""
    await filled(backend, clock, "first")
    await end_all(backend, "first")
    await clock.advance(ENDED)
    await maintain(backend)
    await clock.advance(TTL)
    await maintain(backend)
    await clock.advance(TTL)
    assert await maintain(backend) == 1
    keys, size = stored.keys(), stored.bytes()
    assert keys == {":meta"}
    names = [f"q{number}" for number in range(150)]
    await filled(backend, clock, *names)
    await end_all(backend, *names)
    assert len(stored.keys(":q:")) > 5 * len(names)
    await clock.advance(ENDED)
    await maintain(backend)
    removed = []
    for _ in range(2):
        await clock.advance(TTL)
        removed += [(await backend.control.maintain()).removed for _ in range(3)]
    assert removed == [0, 0, 0, 100, 50, 0], "a pass was not bounded"
    assert stored.keys() == keys
    assert stored.bytes() <= size + 100, "the numbers in the partition's own hash vary in length"
    assert await backend.control.queues() == ()


async def test_settings_are_kept(backend: RedisBackend, clock: ManualClock, stored: Stored) -> None:
    """A8: of an idle queue with settings, its settings and counters remain, and no key of its tasks or tenants."""
    settings = await backend.control.configure(
        KEY,
        QueueSettings(
            queue_ttl=60,
            order=Order.FAIR,
            weights={"a": 2},
            tenant_max_inflight=100,
            tenant_rate_limit=RateLimit(max_tokens=100),
            max_processing_time=60,
        ),
    )
    for tenant in "abc":
        await publish(backend, f"t-{tenant}", tenant=tenant)
    await backend.control.cancel(KEY, "t-c")
    await filled(backend, clock, KEY)
    subscription = backend.subscribe([KEY], "w")
    await subscription.ack(*await take(subscription, 2))
    await subscription.close()
    await end_all(backend, KEY)
    ledger = await backend.control.ledger(KEY)
    await clock.advance(ENDED)
    await maintain(backend)
    await clock.advance(61)
    assert await maintain(backend) == 1
    mine = f":q:{KEY}"
    assert stored.keys(":q:") == {mine, f"{mine}/n", f"{mine}/f", f"{mine}/W"}
    assert stored.keys() - stored.keys(":q:") == {":meta", ":idle", ":queues"}
    assert await backend.control.settings(KEY) == settings
    assert await backend.control.ledger(KEY) == ledger
    await clock.advance(61)
    assert await maintain(backend) == 0, "removed twice"
    await filled(backend, clock, KEY)
    await end_all(backend, KEY)
    assert (await backend.control.ledger(KEY)).imbalance == 0


async def test_used_queues_stay(backend: RedisBackend, clock: ManualClock) -> None:
    """A8: a queue with a task, a dead letter, a remembered end, a result or a consumer is not removed (laws 1, 7)."""
    await backend.control.configure("result", QueueSettings(result_ttl=10 * TTL, version=0))
    await backend.control.configure("ended", QueueSettings(dedupe_window=10 * TTL, version=0))
    for key in ("waiting", "dead", "result", "ended"):
        await publish(backend, "t", key=key)
    await publish(backend, "t", key="scheduled", not_before=clock.now() + 20 * TTL)
    taker = backend.subscribe(["dead", "result", "ended"], "w")
    for delivery in await take(taker, 3):
        if delivery.task.key == "dead":
            await taker.dead_letter(delivery, "broken")
        else:
            await taker.ack(delivery, results=[b"1" if delivery.task.key == "result" else None])
    await taker.close()
    consumer = backend.subscribe(["consumed"], "w")
    await consumer.receive(1, 0)
    for _ in range(4):
        await clock.advance(TTL)
        await consumer.receive(1, 0)
        assert await maintain(backend) == 0
    queues = {"waiting", "dead", "result", "ended", "scheduled", "consumed"}
    assert set(await backend.control.queues()) == queues
    assert (await backend.control.results("result", "t")) == (b"1",)
    answers = await backend.publisher.publish(Task(key="ended", id="t"))
    assert answers[0].status is Published.DUPLICATE
    await publish(backend, "t", key="consumed")
    await consumer.ack(*await take(consumer, 1))
    await consumer.close()


async def test_activity_postpones_the_removal(backend: RedisBackend, clock: ManualClock) -> None:
    """A8: a task between two checks counts, even if its record is gone again at the second check."""
    await backend.control.configure("short", QueueSettings(dedupe_window=0, result_ttl=0))
    await publish(backend, "t", key=KEY)
    await backend.control.cancel(KEY, "t")
    await clock.advance(ENDED)
    await maintain(backend)
    for _ in range(4):
        await clock.advance(TTL - ENDED)
        await maintain(backend)
        await publish(backend, "t", key=KEY)
        await backend.control.cancel(KEY, "t")
        await clock.advance(ENDED)
        assert await maintain(backend) == 0


async def test_a_removed_queue_starts_cleanly(
    backend: RedisBackend, clock: ManualClock, stored: Stored
) -> None:
    """A8, law 2: the first task after a removal is delivered, and receipts from before are stale."""
    await publish(backend, "t")
    subscription = backend.subscribe([KEY], "w")
    (old,) = await take(subscription, 1)
    await subscription.ack(old)
    await subscription.close()
    await clock.advance(ENDED)
    await maintain(backend)
    for _ in range(2):
        await clock.advance(TTL)
        await maintain(backend)
    assert stored.keys(":q:") == set()
    subscription = backend.subscribe([KEY], "w")
    await publish(backend, "t")
    (new,) = await take(subscription, 1)
    assert new.receipt != old.receipt
    with pytest.raises(Exception, match="receipt"):
        await subscription.ack(old)
    await subscription.ack(new)
    assert (await backend.control.ledger(KEY)).done == 1
    await subscription.close()


async def test_queues_of_earlier_versions(
    backend: RedisBackend, clock: ManualClock, redis_server: RedisServer, redis_prefix: str
) -> None:
    """A8: a queue that an earlier version created, without an index of idle queues, is found and removed."""
    await publish(backend, "t")
    await backend.control.cancel(KEY, "t")
    redis_server.call("DEL", f"{{{redis_prefix}:0}}:idle")
    await clock.advance(ENDED)
    await maintain(backend)
    for _ in range(2):
        await clock.advance(TTL)
        await maintain(backend)
    assert await backend.control.queues() == ()


async def test_delete_leaves_nothing(backend: RedisBackend, stored: Stored) -> None:
    """A8: a deletion removes more records than one call handles, and every key and index entry of the queue."""
    await backend.control.configure(KEY, QueueSettings(journal=True, capacity=5000))
    await publish(backend, *(f"t{number}" for number in range(1200)))
    subscription = backend.subscribe([KEY], "w")
    with pytest.raises(QueueInUse, match=r"waiting tasks: 1200\)"):
        await backend.control.delete(KEY)
    deliveries = await take(subscription, 1100)
    await subscription.ack(*deliveries, results=[b"1"] * 1100)
    await backend.control.purge(KEY)
    with pytest.raises(QueueInUse, match=r"consumers: 1\)"):
        await backend.control.delete(KEY)
    await subscription.close()
    scripts, budget = backend._context.scripts, 100
    _, forgotten, over, _ = await scripts.run("delete", scripts.partitions.of(KEY), KEY, budget, "")
    assert (forgotten, over) == (budget, 0), "one script call deletes no more than its budget"
    done = await backend.control.delete(KEY)
    assert (done.deleted, done.forgotten) == (True, 1200 - budget)
    assert stored.keys() == {":meta", ":journal"}
    assert not (await backend.control.delete(KEY)).deleted
    assert stored.keys() == {":meta", ":journal"}, "a deletion of an unknown queue created it"


async def test_retry_tokens_are_bounded(
    backend: RedisBackend, redis_server: RedisServer, redis_prefix: str
) -> None:
    """A8: a task keeps the tokens of its last retries, which are duplicates when repeated, and no more."""
    task = Task(key=KEY, id="t")
    sizes = []
    for number in range(3 * LIMITS.retry_tokens):
        told = await backend.publisher.schedule_retry(task, 1.0, token=f"token-{number:03}")
        assert told.status is Published.ACCEPTED
        if number % LIMITS.retry_tokens == LIMITS.retry_tokens - 1:
            packed = redis_server.call("HGET", f"{{{redis_prefix}:0}}:q:{KEY}/x", "t")
            sizes.append(len(packed))
    assert sizes[2] <= sizes[0] + 3 * LIMITS.retry_tokens, f"the record grew: {sizes}"
    for number in range(2 * LIMITS.retry_tokens, 3 * LIMITS.retry_tokens):
        told = await backend.publisher.schedule_retry(task, 1.0, token=f"token-{number:03}")
        assert told.status is Published.DUPLICATE
    (status,) = await backend.control.statuses(KEY, "t")
    assert status is not None
    assert status.state is State.SCHEDULED


@pytest.mark.parametrize("settings", [{"dedupe_window": 8}, {"dedupe_window": 1, "keep_ended": 8}])
async def test_ended_tasks_go_at_their_time(
    backend: RedisBackend, clock: ManualClock, stored: Stored, settings: dict[str, float]
) -> None:
    """Law 7: an ended task goes at the end of the window, or of `keep_ended`; then no queue waits for maintenance."""
    await backend.control.configure(KEY, QueueSettings.model_validate(settings))
    await publish(backend, "t")
    async with backend.subscribe([KEY], "w") as consumer:
        await consumer.ack(*await take(consumer, 1))
    await clock.advance(7)
    assert (await backend.control.maintain()).forgotten == 0
    await clock.advance(1)
    assert (await backend.control.maintain()).forgotten == 1
    assert stored.keys(":forget") == set()


async def test_nothing_of_an_erased_task_is_left(
    backend: RedisBackend, clock: ManualClock, stored: Stored
) -> None:
    """U18: no key has the id of an erased task, whose record was kept for the period of its unique key."""
    settings = QueueSettings(index=("user",), dedupe_window=1, result_ttl=1)
    await backend.control.configure(KEY, settings)
    unique = UniqueKey(key="k", period=600)
    task = Task(key=KEY, id="the-erased", unique=unique, tags=("user:1",))
    await backend.publisher.publish(task)
    async with backend.subscribe([KEY], "w") as consumer:
        await consumer.ack(*await take(consumer, 1), results=[b"1"])
    await clock.advance(2)
    await backend.control.maintain()
    await backend.control.maintain()
    assert stored.naming("the-erased")
    assert (await backend.listing.erase(KEY, "user:1")).count == 1
    assert stored.naming("the-erased") == set()


async def test_no_list_of_ends_names_an_erased_task(backend: RedisBackend, stored: Stored) -> None:
    """U18: an erasure of few tasks finds one in the list of ends, among hundreds that ended at the same time."""
    await backend.control.configure(KEY, QueueSettings(index=("user",)))
    tasks = [Task(key=KEY, id=f"t{n:03}", tags=(f"user:{n}",)) for n in range(500)]
    await backend.publisher.publish(*tasks)
    async with backend.subscribe([KEY], "w") as consumer:
        await consumer.ack(*await take(consumer, len(tasks)))
    for number in (50, 350, 499, 0):
        assert (await backend.listing.erase(KEY, f"user:{number}", limit=1)).count == 1
        assert stored.naming(f"t{number:03}") == set()
