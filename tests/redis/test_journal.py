"""The journal in Redis: each script records the state changes of queues that enable the journal."""

import json
from pathlib import Path
from typing import Any

import pytest

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from taskqueue_redis.journal.keep import keep_journal
from taskqueue_redis.journal.reader import COLUMNS as NAMES
from taskqueue_redis.journal.reader import RedisJournalReader, entries_of
from tests.redis.backends import KEY, opened, publish, take
from tests.redis.links import settings_for
from tests.redis.servers import RedisServer

COLUMNS = (
    "task_id", "attempt", "losses", "priority", "tenant", "ordering_key", "due_at", "error",
)  # fmt: skip


def journal(server: RedisServer, prefix: str) -> list[dict[str, str]]:
    """Return all journal lines of a partition, one per state change."""
    entries: list[Any] = server.call("XRANGE", f"{{{prefix}:0}}:journal", "-", "+")
    lines = []
    for place, words in entries:
        texts = [word.decode(errors="replace") for word in words]
        fields = dict(zip(texts[::2], texts[1::2], strict=True))
        columns = {name: fields.pop(name).split("\0") for name in COLUMNS}
        for n in range(len(columns["task_id"])):
            row = {
                name: values[n] if len(values) > 1 else values[0]
                for name, values in columns.items()
            }
            lines.append({"seq": str(int(place.split(b"-")[0]) + n), **fields, **row})
    return lines


async def test_a_life_is_written_down(
    redis_server: RedisServer, redis_url: str, redis_prefix: str
) -> None:
    """Law 1: publish, delivery, loss, retry, death, redrive and ack are recorded in order, numbered without gaps."""
    assert redis_url
    backend = RedisBackend()
    try:
        await backend.control.configure("k", QueueSettings(journal=True))
        await backend.publisher.publish(Task(key="k", id="t1", tenant="acme"))
        await backend.publisher.publish(Task(key="quiet", id="t2"))
        async with backend.subscribe(["k"], "w") as subscription:

            async def take() -> Any:
                (delivery,) = (await subscription.receive(1, 5)).deliveries
                return delivery

            await subscription.redeliver(await take(), lost=True)
            delivery = await take()
            await backend.publisher.schedule_retry(
                delivery.task, backend.now() + 60, error="boom", settles=delivery
            )
            assert await backend.control.reschedule("k", "t1", backend.now() - 1)
            await subscription.dead_letter(await take(), "enough", "boom again")
            assert await backend.dead_letters.redrive("k") == 1
            await subscription.ack(await take())
        lines = journal(redis_server, redis_prefix)
        assert [line["event"] for line in lines] == [
            "configured", "published", "delivered", "lost", "delivered", "retried", "rescheduled",
            "available", "delivered", "dead_lettered", "redriven", "delivered", "acked",
        ]  # fmt: skip
        assert [int(line["seq"]) for line in lines] == list(range(1, 14))
        assert {line["task_id"] for line in lines[1:]} == {"t1"}
        assert lines[1]["tenant"] == "acme"
        assert int(lines[6]["due_at"]) < int(lines[6]["ts"]) < int(lines[5]["due_at"])
        assert (lines[5]["error"], lines[9]["reason"]) == ("boom", "enough")
        assert {line["worker"] for line in lines if line["event"] == "delivered"} == {"w"}
    finally:
        await backend.aclose()


async def test_worker_of_an_adopted_task(redis_server: RedisServer, redis_prefix: str) -> None:
    """Law 2: a task that was adopted ends with its worker, although its former consumer is closed."""
    async with opened(redis_server.url, redis_prefix) as backend:
        await backend.control.configure(KEY, QueueSettings(journal=True))
        await publish(backend, "t")
        old, new = backend.subscribe([KEY], "w"), backend.subscribe([KEY], "w")
        (delivery,) = await take(old, 1)
        await new.adopt(delivery.receipt)
        await old.close()
        await new.ack(delivery)
        await new.close()
    assert journal(redis_server, redis_prefix)[-1]["worker"] == "w"


async def told(reader: RedisJournalReader, start: int, end: int) -> list[tuple[int, str]]:
    """Return the numbers and task ids of the state changes between two numbers."""
    lines = []
    (partition,) = reader.partitions
    async for reply in reader.read(partition, start, end):
        for entry in entries_of(reply):
            ids = entry.values[7].decode().split("\0")
            assert len(ids) == entry.size
            lines += [(entry.seq + n, name) for n, name in enumerate(ids)]
    return [line for line in lines if start <= line[0] <= end]


@pytest.mark.oldest
async def test_a_reader(each_redis: RedisServer, redis_prefix: str) -> None:
    """G8: any part of the journal can be read by number or by time, without the consumer groups of the workers."""
    assert (*COLUMNS, "digest") == NAMES
    async with opened(each_redis.url, redis_prefix) as backend:
        await backend.control.configure(KEY, QueueSettings(journal=True))
        await publish(backend, *(f"t{n}" for n in range(1500)))
        async with backend.subscribe([KEY], "w") as consumer:
            deliveries = await take(consumer, 1500, limit=100)
            between = round(backend.now() * 1e6)
            await consumer.ack(*deliveries[:700])
            await consumer.ack(deliveries[700])
        async with RedisJournalReader(settings_for(each_redis.url, prefix=redis_prefix)) as reader:
            (partition,) = reader.partitions
            span = await reader.span(partition)
            assert (span.first, span.last) == (1, 1 + 1500 + 1500 + 701 + 799)
            everything = await told(reader, 1, span.last)
            assert [number for number, _ in everything] == list(range(1, span.last + 1))
            names = [f"t{n}" for n in range(1500)]
            assert [name for _, name in everything] == [
                "",
                *names,
                *names,
                *names[:701],
                *names[701:],
            ]
            assert await told(reader, 260, 300) == everything[259:300]
            assert await told(reader, span.last, span.last + 9) == everything[-1:]
            assert await told(reader, span.last + 1, span.last + 9) == []
            assert await reader.at(partition, between) == 3002
            assert await reader.at(partition, 0) == 1
            assert await reader.at(partition, between * 2) == span.last + 1
            assert (
                (await reader.time(partition, 3002) or 0)
                >= between
                > (await reader.time(partition, 3001) or 0)
            )
            assert await reader.time(partition, span.last + 1) is None


async def test_the_oldest_go(each_redis: RedisServer, redis_prefix: str) -> None:
    """G9: lines beyond the maximum length of the journal are dropped, and its span shows which are left."""
    async with opened(each_redis.url, redis_prefix, journal_length=1000) as backend:
        await publish(backend, "first")
    # This backend does not set the journal length, so the stored length stays in force.
    async with opened(each_redis.url, redis_prefix) as backend:
        await backend.control.configure(KEY, QueueSettings(journal=True))
        for start in range(0, 8000, 8):
            await publish(backend, *(f"t{n}" for n in range(start, start + 8)))
        async with RedisJournalReader(settings_for(each_redis.url, prefix=redis_prefix)) as reader:
            (partition,) = reader.partitions
            span = await reader.span(partition)
            assert span.last == 8001
            assert 5000 < span.first <= 8001 - 1000
            assert len(await told(reader, 1, span.last)) == span.last - span.first + 1
            assert await reader.at(partition, 0) == span.first
            assert await reader.time(partition, span.first - 1) is None


async def test_lines_of_as_many_partitions_as_there_are(
    redis_server: RedisServer, redis_prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """G9: exporting the journal reads all partitions of the store, whatever number the settings have (fault L2)."""
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    keys = [f"q{n}" for n in range(8)]
    async with opened(redis_server.url, redis_prefix, partitions=8) as backend:
        for key in keys:
            await backend.control.configure(key, QueueSettings(journal=True))
            await backend.publisher.publish(Task(key=key, id="t"))
    for key in keys:
        await keep_journal(key, tmp_path / key, 0, {})
        lines = [json.loads(line) for line in (tmp_path / key).read_text().splitlines()]
        assert [line["event"] for line in lines] == ["configured", "published"]
