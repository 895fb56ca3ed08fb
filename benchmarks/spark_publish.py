"""Publishing many tasks through the Spark sink, compared with a plain script that publishes them in chunks."""

from __future__ import annotations

import asyncio
import json
import time

import processes
import pyarrow as pa
import pyarrow.parquet as pq
import spark_stage
from entries.adapter import payload
from pyspark.sql import SparkSession
from spark_sizes import Sizes

from taskqueue_core import Task
from taskqueue_redis import RedisBackend, RedisSettings

_CHUNK = 250
_AT_ONCE = 4
"""number of chunks that the plain script publishes at the same time"""
_PASSES = 3
_PREFIX = "publish"


def measure(sizes: Sizes, turn: int) -> dict[str, list[float]]:
    """Return tasks per second for the sink, for the script and for publishing the same tasks again, and a ratio."""
    del turn
    found: dict[str, list[float]] = {}
    with (
        processes.RedisServer() as redis,
        spark_stage.folder() as place,
        spark_stage.spark() as session,
    ):
        texts = [json.dumps(payload(number)).encode() for number in range(sizes.publish)]
        for number in range(_PASSES + 1):
            ids = [f"{number}-{place_of:08d}" for place_of in range(sizes.publish)]
            path = str(place / f"tasks-{number}.parquet")
            table = pa.table({"task_id": ids, "payload": pa.array(texts, pa.binary())})
            pq.write_table(table, path, row_group_size=sizes.publish // 4)
            rates = {
                "publish, the sink, tasks/s": _sink(session, redis, path, f"sink-{number}"),
                "publish, the sink, all known already, tasks/s": _sink(session, redis, path, f"sink-{number}"),
                "publish, a plain script, tasks/s": asyncio.run(
                    _script(redis, f"script-{number}", ids, texts)
                ),
            }  # fmt: skip
            for name, rate in rates.items() if number else ():  # the first time warms Spark up
                found.setdefault(name, []).append(sizes.publish * rate)
            for key in (f"sink-{number}", f"script-{number}"):
                _check(redis, key, sizes.publish)
    pairs = zip(
        found["publish, the sink, tasks/s"], found["publish, a plain script, tasks/s"], strict=True
    )
    return found | {"publish, the sink, x plain script": [one / other for one, other in pairs]}


def _sink(session: SparkSession, redis: processes.RedisServer, path: str, key: str) -> float:
    tasks = session.read.parquet(path)
    start = time.perf_counter()
    writer = tasks.write.format("taskqueue").mode("append")
    writer.options(url=redis.url, prefix=_PREFIX, queue=key).save()
    return 1 / (time.perf_counter() - start)


async def _script(
    redis: processes.RedisServer, key: str, ids: list[str], texts: list[bytes]
) -> float:
    backend = RedisBackend(settings=_settings(redis))
    start = time.perf_counter()
    free = asyncio.Semaphore(_AT_ONCE)

    async def send(first: int) -> None:
        async with free:
            some = range(first, min(first + _CHUNK, len(ids)))
            await backend.publisher.publish(
                *[Task(key=key, id=ids[place], payload=texts[place]) for place in some]
            )

    async with asyncio.TaskGroup() as group:
        for first in range(0, len(ids), _CHUNK):
            group.create_task(send(first))
    lasted = time.perf_counter() - start
    await backend.aclose()
    return 1 / lasted


def _check(redis: processes.RedisServer, key: str, tasks: int) -> None:
    async def ask() -> None:
        backend = RedisBackend(settings=_settings(redis))
        ledger = await backend.control.ledger(key)
        assert ledger.published == tasks, f"{ledger.published} of {tasks} published"
        await backend.aclose()

    asyncio.run(ask())


def _settings(redis: processes.RedisServer) -> RedisSettings:
    return RedisSettings(url=redis.url, prefix=_PREFIX, _env_file=None)  # type: ignore[arg-type,call-arg]
