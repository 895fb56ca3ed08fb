"""Test of the pipeline on a Spark cluster with a master and two workers, whose executors are separate processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from pyspark.sql import SparkSession

from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend, RedisSettings
from taskqueue_spark.pipeline.audit import VERDICTS
from tests.redis.servers import RedisServer
from tests.spark.spark_servers import LIGHT, cluster, taskqueue

KEY = "resize"


async def a_journal(settings: RedisSettings) -> None:
    """Publish tasks, ack most of them and dead-letter one."""
    backend = RedisBackend(settings=settings)
    queue = await backend.control.settings(KEY)
    await backend.control.configure(KEY, queue.model_copy(update={"journal": True}))
    await backend.publisher.publish(*(Task(key=KEY, payload=b"{}") for _ in range(60)))
    async with backend.subscribe([KEY], "worker") as consumer:
        taken = (await consumer.receive(50, 1)).deliveries
        await consumer.ack(*taken[1:])
        await consumer.dead_letter(taken[0], "rejected", "a reason")
    await backend.aclose()


def tasks_of(events: Path) -> dict[str, int]:
    """Return how many Spark tasks each executor has run, from Spark's event log."""
    done: dict[str, int] = {}
    for path in events.rglob("*"):
        for line in (
            path.read_text().splitlines() if path.is_file() and path.suffix != ".crc" else ()
        ):
            event: dict[str, Any] = json.loads(line)
            if event["Event"] == "SparkListenerTaskEnd":
                executor = event["Task Info"]["Executor ID"]
                done[executor] = done.get(executor, 0) + 1
    return done


@pytest.mark.long  # starts Java four times
async def test_the_same_commands_on_a_cluster(
    spark: SparkSession, tmp_path: Path, redis_server: RedisServer, redis_prefix: str
) -> None:
    """An audit on the cluster reads the journal with both workers, and its verdicts are correct (G12)."""
    await a_journal(RedisSettings(url=SecretStr(redis_server.url), prefix=redis_prefix))
    events = tmp_path / "events"
    events.mkdir()
    conf = LIGHT | {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "512m",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{events}",
        "spark.eventLog.compress": "false",
    }
    words = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    asked = ("audit", "--backend", "redis", "--no-live", "--out", str(tmp_path / "out"), "--json")
    store = {"TASKQUEUE_REDIS_URL": redis_server.url, "TASKQUEUE_REDIS_PREFIX": redis_prefix}
    with cluster(spark, tmp_path, workers=2) as master:
        (told,) = taskqueue((*asked, "--master", master, *words), variables=store)
    assert tasks_of(events).keys() == {"0", "1"}
    (row,) = told["conservation"]
    assert (row["key"], row["published"], row["balanced"]) == (KEY, 60, True)
    found = {name: row[name] for name in VERDICTS if row[name]}
    assert found == {"completed": 49, "dead_lettered": 1, "waiting": 10}
