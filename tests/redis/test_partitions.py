"""A backend with several partitions: one that is unavailable or slow neither delays the others nor loses tasks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed
from taskqueue_core.tasks import Delivery, Published, Refusal, Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.connection.errors import contract_error
from taskqueue_redis.connection.failures import AnswerLost, Failure, NotReached, Refused
from taskqueue_redis.scripts.runner import ScriptRunner
from taskqueue_redis.subscription import RedisSubscription
from tests.redis.backends import KEY, PATIENCE, opened, publish, take, until

KEYS = tuple(f"{KEY}{n}" for n in range(8))


class Faults:
    """Faults for the scripts of a backend: those of a chosen partition fail, or their answers do not arrive."""

    def __init__(self, scripts: ScriptRunner) -> None:
        self._run = scripts.run
        self.failing: set[str] = set()
        self.silent: set[str] = set()
        """partitions whose answers to a receive are held back until `cure`"""
        self.heard = asyncio.Event()
        self.error: Exception = BackendUnavailable("out of reach")
        self.publishes: dict[str, Failure] = {}
        """the failure raised by a publish, by partition"""
        self.asked = Counter[str]()

    async def run(self, name: str, partition: str, *words: Any, **more: Any) -> Any:
        """Run a script, unless it is to fail."""
        self.asked[partition] += name == "receive"
        if name in {"receive", "pending", "maintain"} and partition in self.failing:
            raise self.error
        if name == "publish" and partition in self.publishes:
            failure = self.publishes[partition]
            raise contract_error(failure) from failure
        told = await self._run(name, partition, *words, **more)
        if name == "receive" and partition in self.silent:
            await self.heard.wait()
        return told

    def cure(self) -> None:
        """Remove all faults."""
        self.failing.clear()
        self.silent.clear()
        self.heard.set()


@pytest.fixture
async def backend(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend with four partitions."""
    async with opened(redis_url, redis_prefix, partitions=4, lease=60.0) as backend:
        yield backend


@pytest.fixture
def faults(backend: RedisBackend, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults that a test can inject into the scripts of the backend."""
    faults = Faults(backend._context.scripts)
    monkeypatch.setattr(backend._context.scripts, "run", faults.run)
    return faults


def places(backend: RedisBackend) -> dict[str, list[str]]:
    """Return the queues of each partition."""
    return backend._context.scripts.partitions.group(KEYS)


async def began(consumer: RedisSubscription) -> None:
    """Register a consumer in every partition by an empty receive."""
    assert (await consumer.receive(1, 0)).deliveries == ()


async def published(backend: RedisBackend, name: str) -> None:
    """Publish a task with this id to each queue."""
    for key in KEYS:
        await publish(backend, name, key=key)


def names(*deliveries: Delivery) -> list[tuple[str, str]]:
    """Return the queue and id of each delivery, sorted."""
    return sorted((d.task.key, d.task.id) for d in deliveries)


async def test_one_that_is_out_of_reach(backend: RedisBackend, faults: Faults) -> None:
    """A9, fault C7: if a partition is unavailable, a receive returns the tasks of the others at once.

    The partition is retried only now and then; when it is back, a waiting receive is woken. Fault M5.
    """
    bad, *_ = places(backend)
    theirs = [(key, "t") for key in KEYS if key in places(backend)[bad]]
    async with backend.subscribe(KEYS, "c") as consumer:
        await began(consumer)
        await published(backend, "t")
        faults.failing.add(bad)
        received = await consumer.receive(10, 0)
        found = list(received.deliveries)
        assert not received.again
        while len(found) < len(KEYS) - len(theirs):
            found += await take(consumer, 1)
        assert names(*found) == [(key, "t") for key in KEYS if (key, "t") not in theirs]
        await consumer.ack(*found)
        before = faults.asked[bad]
        waiting = asyncio.create_task(consumer.receive(10, None))
        await until(lambda: consumer.asleep, "it waits")
        await asyncio.sleep(0.5)
        for _ in range(50):  # on a stalled machine, lets overdue callbacks run first
            await asyncio.sleep(0)
        assert 0 < faults.asked[bad] - before <= 3, "it is asked now and then"
        assert not waiting.done()
        faults.cure()
        async with asyncio.timeout(PATIENCE):
            late = list((await waiting).deliveries)
        while len(late) < len(theirs):
            late += await take(consumer, 1)
        assert names(*late) == theirs
        await consumer.ack(*late)
        assert not consumer._receiver._unavailable


async def test_one_that_keeps_silent(backend: RedisBackend, faults: Faults) -> None:
    """A9, faults B10 and E3: a receive does not wait for a slow partition.

    Tasks in its late answer are delivered later, as the same deliveries. Fault M5.
    """
    bad, *_ = places(backend)
    async with backend.subscribe(KEYS, "c") as consumer:
        await began(consumer)
        await published(backend, "t")
        faults.silent.add(bad)
        found = list((await consumer.receive(10, None)).deliveries)
        while len(found) < len(KEYS) - len(places(backend)[bad]):
            found += await take(consumer, 1)
        waiting = asyncio.create_task(consumer.receive(10, None))
        await until(lambda: consumer.asleep or waiting.done(), "it waits")
        faults.cure()
        async with asyncio.timeout(PATIENCE):
            found += (await waiting).deliveries
        while len(found) < len(KEYS):
            found += await take(consumer, 1)
        assert names(*found) == [(key, "t") for key in KEYS]
        assert {(d.attempt, d.losses) for d in found} == {(1, 0)}
        await consumer.ack(*found)
    for key in KEYS:
        stats = await backend.control.stats(key)
        assert (stats.delivered, stats.redelivered, stats.ledger.done) == (1, 0, 1)


async def test_all_are_out_of_reach(backend: RedisBackend, faults: Faults) -> None:
    """Fault E9: if no partition is available, a receive raises an error, and no task is lost (fault M5)."""
    async with backend.subscribe(KEYS, "c") as consumer:
        await began(consumer)
        await published(backend, "t")
        faults.failing.update(places(backend))
        with pytest.raises(BackendUnavailable, match="out of reach"):
            await consumer.receive(10, 0)
        faults.cure()
        found = await take(consumer, len(KEYS), limit=20)
        assert names(*found) == [(key, "t") for key in KEYS]
        await consumer.ack(*found)


async def test_one_that_fails_in_another_way(backend: RedisBackend, faults: Faults) -> None:
    """A9, fault E3: an unexpected error in one partition reaches the caller.

    Tasks already received from the other partitions are delivered next (fault M5).
    """
    bad, *_ = places(backend)
    async with backend.subscribe(KEYS, "c") as consumer:
        await began(consumer)
        await published(backend, "t")
        faults.error = LookupError("a mistake")
        faults.failing.add(bad)
        with pytest.raises(LookupError, match="a mistake"):
            await consumer.receive(10, 0)
        faults.cure()
        found = await take(consumer, len(KEYS), limit=20)
        assert names(*found) == [(key, "t") for key in KEYS]
        assert {(d.attempt, d.losses) for d in found} == {(1, 0)}


async def test_who_was_given_up_in_one(backend: RedisBackend, faults: Faults) -> None:
    """D10, fault A4: a consumer forgotten by one partition registers with a new token in all of them (fault M5)."""
    bad, *_ = places(backend)
    async with backend.subscribe(KEYS, "c") as consumer:
        for silent in (False, True):
            await began(consumer)
            token, name = consumer.token, f"t{silent}"
            faults.heard.clear()
            if silent:  # with this fault, the consumer learns it outside of a receive
                faults.failing.add(bad)
                assert (await consumer.receive(10, 0)).deliveries == ()
            await published(backend, name)
            assert await faults._run("leave", bad, token, 100)
            faults.cure()
            found = await take(consumer, len(KEYS), limit=20)
            assert consumer.token != token
            assert names(*found) == [(key, name) for key in KEYS]
            await consumer.ack(*found)


async def test_what_expired_without_a_waiting_consumer(
    redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 8, fault E3: a later receive reports the expired deadlines that a partition reported late (fault M5)."""
    clock = ManualClock(1_700_000_000.0)
    async with opened(redis_url, redis_prefix, partitions=4, clock=clock) as backend:
        faults = Faults(backend._context.scripts)
        monkeypatch.setattr(backend._context.scripts, "run", faults.run)
        bad, *_ = places(backend)
        key, *_ = places(backend)[bad]
        async with backend.subscribe(KEYS, "c") as consumer:
            await began(consumer)
            await publish(backend, "late", key=key, deadline=clock.now() + 1)
            await clock.advance(2)
            faults.silent.add(bad)
            found = list((await consumer.receive(10, 0)).expired)
            assert found == []
            faults.cure()
            async with asyncio.timeout(PATIENCE):
                while not found:
                    found += (await consumer.receive(10, 0)).expired
                    await asyncio.sleep(0)
            assert [(one.key, one.task_id) for one in found] == [(key, "late")]
            assert (await consumer.receive(10, 0)).expired == ()


async def test_maintenance_where_one_is_out_of_reach(backend: RedisBackend, faults: Faults) -> None:
    """Fault C7: a pass maintains all available partitions, and fails only if none is available (fault M5)."""
    bad, *_ = places(backend)
    await published(backend, "t")
    faults.failing.add(bad)
    told = await backend.control.maintain()
    assert told.unclaimed == tuple(key for key in KEYS if key not in places(backend)[bad])
    faults.error = LookupError("a mistake")
    with pytest.raises(LookupError, match="a mistake"):
        await backend.control.maintain()
    faults.error = BackendUnavailable("out of reach")
    faults.failing.update(places(backend))
    with pytest.raises(BackendUnavailable, match="out of reach"):
        await backend.control.maintain()


async def test_shares_of_a_receive(backend: RedisBackend) -> None:
    """A9: a receive takes equal shares from the queues of all partitions, and never more than its limit (fault M5)."""
    for key in KEYS:
        await publish(backend, *(f"t{n}" for n in range(8)), key=key)
    async with backend.subscribe(KEYS, "c") as consumer:
        first = (await consumer.receive(16, 0)).deliveries
        assert Counter(d.task.key for d in first) == dict.fromkeys(KEYS, 2)
        assert [d.task.key for d in first[:8]] == [d.task.key for d in first[8:]]
        for limit in (3, 5):
            assert len((await consumer.receive(limit, 0)).deliveries) == limit
        rest = await take(consumer, 40, limit=9)
        assert len({(d.task.key, d.task.id) for d in (*first, *rest)}) == 56


async def test_one_call_for_many_partitions(backend: RedisBackend) -> None:
    """A17: results of a call over several partitions are in the order of its tasks (fault M5)."""
    tasks = [Task(key=KEYS[n % 8], id=f"t{n // 8}") for n in range(32)]
    await backend.publisher.publish(tasks[3], tasks[9])
    told = await backend.publisher.publish(*tasks)
    assert [(one.key, one.task_id) for one in told] == [(task.key, task.id) for task in tasks]
    assert [n for n, one in enumerate(told) if one.status == "duplicate"] == [3, 9]
    async with backend.subscribe(KEYS, "c") as consumer:
        found = await take(consumer, 32)
        assert set(await consumer.ack(*found[:10], *found[5:15])) == {"ok"}
        assert set(await consumer.redeliver(*found[15:])) == {"ok"}
        again = await take(consumer, 17)
        assert names(*again) == names(*found[15:])
    assert sum([(await backend.control.ledger(key)).done for key in KEYS]) == 15


async def test_a_publish_that_is_stored_in_part(backend: RedisBackend, faults: Faults) -> None:
    """Law 7, fault E1: a publish that may be stored in part is unconfirmed.

    If certainly nothing was stored, the error is `BackendUnavailable`. Fault M5.
    """
    tasks = [Task(key=key, id="t") for key in KEYS]
    one, two, *rest = places(backend)
    faults.publishes = {one: NotReached()}
    with pytest.raises(PublishUnconfirmed, match="only part"):
        await backend.publisher.publish(*tasks)
    faults.publishes = dict.fromkeys((one, two, *rest), NotReached())
    with pytest.raises(BackendUnavailable, match="unavailable"):
        await backend.publisher.publish(*tasks)
    faults.publishes[two] = AnswerLost()
    with pytest.raises(PublishUnconfirmed, match="response was lost"):
        await backend.publisher.publish(*tasks)
    faults.publishes = {}
    told = await backend.publisher.publish(*tasks)
    assert all(answer.stored for answer in told)
    new = {answer.key for answer in told if answer.status is Published.ACCEPTED}
    assert new == set(places(backend)[one])


async def test_a_publish_that_one_refuses(backend: RedisBackend, faults: Faults) -> None:
    """Law 6, fault B8: if one partition is out of memory, its tasks are refused and those of the others stored.

    Fault M5.
    """
    tasks = [Task(key=key, id="t") for key in KEYS]
    one, *_ = places(backend)
    faults.publishes = {one: Refused("no memory", "OOM")}
    told = await backend.publisher.publish(*tasks)
    refused = [answer for answer in told if answer.status is Published.REFUSED]
    assert [answer.key for answer in refused] == places(backend)[one]
    assert {(answer.code, answer.retry_after) for answer in refused} == {(Refusal.STORE_FULL, 1.0)}
    faults.publishes = {one: Refused("disk", "MISCONF")}
    with pytest.raises(BackendUnavailable, match="no writes: MISCONF"):
        await backend.publisher.publish(Task(key=refused[0].key, id="t"))
