"""Each kind of key that the documentation lists gets a wrong type: other queues continue, and the key is mended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator

import pytest

from taskqueue_conformance.suites.streams import new
from taskqueue_core.capabilities import Endpoint, Seen, StoredSchedule
from taskqueue_core.errors import BackendUnavailable, PublishUnconfirmed, TaskQueueError
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.docs.test_redis_page import KEY, PAGE, SHARED, keep_busy
from tests.redis.backends import PATIENCE, opened
from tests.redis.servers import RedisServer
from tests.redis.test_damage import settled

_LAYOUT = PAGE.split("## For developers: how a task is stored\n", 1)[1].split("\nChannels:")[0]
_NAMES = {
    "P": "{}", "S": "{}:slots", "Q": f"{{}}:q:(?:{KEY}|{SHARED})", "TOKEN": "[0-9a-f]+-[0-9a-f]+",
    "TENANT": "[a-z]+", "ENTITY": "[a-z]+", "N": "[0-9]", "E": "[0-9]+", "ID": "[0-9a-z-]+", "STATE": "[a-z]+",
}  # fmt: skip
_VARIABLE = re.compile(r"^[PQS](?=:|/|$)|TOKEN|TENANT|ENTITY|STATE|ID|N(?=:|$)|(?<=:)E(?=:|$)")


def _kinds() -> dict[str, str]:
    """Return the types of all kinds of keys in the tables of the documentation."""
    kinds = {}
    for line in re.findall(r"^\| (`.*) \|$", _LAYOUT, re.MULTILINE):
        names, types, _ = line.split(" | ", 2)
        for name, kind in zip(names.split(", "), types.split(", "), strict=True):
            kinds[name.strip("`")] = {"sorted set": "zset"}.get(kind, kind)
    return kinds


KINDS = {name: kind for name, kind in _kinds().items() if kind != "any"}
# The record of an ended task does not tell whether the task has a stream.
KINDS["Q/E:the-ended"] = "stream"


def _find(server: RedisServer, partition: str, kind: str) -> str:
    """Return an existing key of a kind."""
    pattern = _VARIABLE.sub(lambda found: _NAMES[found[0]], kind).replace(
        "{}", re.escape(partition)
    )
    keys: list[str] = [key.decode() for key in server.call("KEYS", f"{partition}*")]
    return next(key for key in sorted(keys) if re.fullmatch(pattern, key))


async def _stream_and_end(backend: RedisBackend) -> None:
    """Keep the stream of a task that has ended."""
    await backend.publisher.publish(Task(key=KEY, id="the-ended", priority=9))
    async with backend.subscribe([KEY], "w") as consumer:
        (taken,) = (await consumer.receive(1, 0)).deliveries
        await backend.streams.append(new(taken, 1))
        await consumer.ack(taken)


async def _keep_slots_busy(backend: RedisBackend) -> None:
    """Create every kind of key for slots."""
    pool = backend.slots
    endpoint = Endpoint(model="m", server="s", url="http://s", slots=9)
    await pool.register(endpoint)
    await pool.reconcile("m", "s", Seen(active=0), settled=0.0)
    await pool.configure("m", b"{}")
    first, _ = await pool.acquire("m", "h", ttl=60.0, limit=2)
    (lease,) = await pool.assign((first, "job"), ttl=60.0)
    assert lease
    await pool.leave("m", "job", lease.token, b'"note"')
    await pool.leave("m", "job", "stale", b'"late"')


@pytest.fixture
async def backend(redis_server: RedisServer, redis_prefix: str) -> AsyncIterator[RedisBackend]:
    """A backend of the shared server, with a key of each kind."""
    async with opened(redis_server.url, redis_prefix, lease=15.0) as backend:
        await keep_busy(backend)
        await _stream_and_end(backend)
        await _keep_slots_busy(backend)
        schedule = StoredSchedule(key=KEY, name="daily", spec=b"{}", next_at=backend.now() + 3600)
        await backend.schedules.put(schedule)
        partition = backend._context.scripts.partitions.names[0]
        redis_server.call("RPUSH", f"{partition}:damaged", f"{KEY} id")
        await backend.publisher.publish(Task.of("other", "before", id="before"))
        yield backend


@pytest.mark.parametrize("kind", KINDS)
async def test_a_kind_of_key_has_a_wrong_type(
    backend: RedisBackend,
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """U29: other queues continue, the key is named in the log, has its type again or is gone, and calls work again."""
    monkeypatch.setattr("taskqueue_redis.scripts.runner._REPAIR_SECONDS", 0.1)
    partition = backend._context.scripts.partitions.names[0]
    name = _find(redis_server, partition, kind)
    async with asyncio.timeout(PATIENCE), backend.subscribe(["other"], "c") as consumer:
        redis_server.call("DEL", name)
        redis_server.call(*(("SADD", name, "x") if KINDS[kind] == "string" else ("SET", name, "x")))
        if kind.startswith("Q"):  # no call that names another queue fails
            await backend.publisher.publish(Task.of("other", "now", id="now"))
            await consumer.ack(*(await consumer.receive(10, 0)).deliveries)
            assert (await backend.control.ledger("other")).done == 2
        with caplog.at_level(logging.ERROR):
            while redis_server.call("TYPE", name) not in {KINDS[kind], "none"} or not caplog.text:
                with contextlib.suppress(BackendUnavailable):
                    await backend.control.maintain()
        await backend.control.maintain()
        assert name.partition(f"{partition}:")[2] in caplog.text
        assert (await backend.health()).details["anomalies"]
        for key in (KEY, SHARED, "other"):
            while True:
                with contextlib.suppress(BackendUnavailable, PublishUnconfirmed):
                    task = Task.of(
                        key, "after", id=f"after-{key}", tenant="acme", ordering_key="face"
                    )
                    await backend.publisher.publish(task)
                    break
        executed: set[str] = set()
        async with backend.subscribe([KEY, SHARED, "other"], "d") as last:
            while not executed >= {f"after-{KEY}", "after-other"}:
                with contextlib.suppress(BackendUnavailable):
                    await backend.control.maintain()
                    for delivery in (await last.receive(10, 0)).deliveries:
                        await settled(last, delivery)
                        executed.add(delivery.task.id)
        with contextlib.suppress(TaskQueueError):
            await backend.slots.register(Endpoint(model="m", server="s", url="http://s", slots=9))
        await backend.slots.register(Endpoint(model="m", server="s", url="http://s", slots=9))
        await backend.slots.reconcile("m", "s", Seen(active=0), settled=0.0)
        assert await backend.slots.acquire("m", "h", ttl=60.0)


async def test_statistics_read_together(redis_server: RedisServer, backend: RedisBackend) -> None:
    """U20: a damaged queue does not make the statistics fail of queues that are asked for at the same time."""
    partition = backend._context.scripts.partitions.names[0]
    keys = ("first", "other", "damaged", "third")
    await backend.publisher.publish(Task(key="damaged", id="t"))
    for mended in (True, False):  # the types of keys are checked once in a while only
        redis_server.call("DEL", f"{partition}:q:damaged/J")
        redis_server.call("RPUSH", f"{partition}:q:damaged/J", "x")
        found = await asyncio.gather(*map(backend.control.stats, keys), return_exceptions=True)
        failed = [key for key, one in zip(keys, found, strict=True) if isinstance(one, Exception)]
        assert failed == ([] if mended else ["damaged"])
