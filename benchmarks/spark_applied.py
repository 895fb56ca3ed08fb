"""Whether capacity advice is right in real time: with several keys at once, on the memory backend and on Redis."""

from __future__ import annotations

import asyncio
from typing import Any

import processes
import spark_stage
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own texts call it
from spark_load import play, poisson
from spark_sizes import Sizes

from taskqueue_core.backend import Backend
from taskqueue_memory import MemoryBackend, MemorySettings
from taskqueue_redis import RedisBackend, RedisSettings
from taskqueue_spark.pipeline.capacity import advice

_KEYS = 4
_RATE, _MEAN, _TARGET = 250.0, 0.024, 0.012
_ROOM = 100


def measure(sizes: Sizes, turn: int) -> dict[str, list[float]]:
    """Return for each key the ratio of observed to expected 95th percentile of the wait, and the expected value."""
    found: dict[str, list[float]] = {}
    with (
        processes.RedisServer() as redis,
        spark_stage.folder() as place,
        spark_stage.spark() as session,
    ):
        for name in ("memory", "Redis"):

            def options(phase: str, name: str = name) -> dict[str, str]:
                if name == "memory":
                    return {"path": str(place / phase)}
                return {"url": redis.url, "prefix": phase}

            seeds = 1000 * turn + (500 if name == "Redis" else 0)
            room = dict.fromkeys((f"load-{number}" for number in range(_KEYS)), _ROOM)
            asyncio.run(_play(options("recorded"), room, seeds, sizes.seconds))
            recommended = advised(session, options("recorded"), _TARGET)
            slots = {key: recommended[key]["slots"] for key in room}
            asyncio.run(_play(options("applied"), slots, seeds + 100, sizes.seconds))
            waits = observed(session, options("applied"))
            found[f"capacity, real time, {name}: observed p95 wait, x expected"] = [
                waits[key] / recommended[key]["expected_wait"] for key in room
            ]
            found[f"capacity, real time, {name}: expected p95 wait, ms"] = [
                1000 * recommended[key]["expected_wait"] for key in room
            ]
    return found


async def _play(options: dict[str, str], slots: dict[str, int], seed: int, seconds: float) -> None:
    tasks = int(_RATE * seconds)
    loads = {
        key: poisson(seed + number, tasks, rate=_RATE, mean=_MEAN)
        for number, key in enumerate(slots)
    }
    backend: Backend
    if "path" in options:
        backend = MemoryBackend(settings=MemorySettings(journal=options["path"]))  # type: ignore[arg-type]
    else:
        settings = {"url": options["url"], "prefix": options["prefix"], "_env_file": None}
        backend = RedisBackend(settings=RedisSettings(**settings))  # type: ignore[arg-type]
    await play(backend, loads, slots)
    await backend.aclose()


def advised(
    session: SparkSession, options: dict[str, str], target: float
) -> dict[str, dict[str, Any]]:
    """Return the advice for each key of a journal."""
    rows = advice(_journal(session, options), target).collect()
    assert all(row["reason"] is None for row in rows), rows
    return {row["key"]: row.asDict() for row in rows}


def observed(session: SparkSession, options: dict[str, str]) -> dict[str, float]:
    """Return the 95th percentile of the time from publishing to delivery of each key, in seconds."""
    when = {
        name: F.when(F.col("event") == name, F.unix_micros("ts"))
        for name in ("published", "delivered")
    }
    wait = F.min(when["delivered"]) - F.min(when["published"])
    waits = _journal(session, options).groupBy("key", "task_id").agg(wait.alias("wait"))
    rows = waits.groupBy("key").agg(F.percentile("wait", F.lit(0.95)).alias("p95")).collect()
    return {row["key"]: row["p95"] / 1e6 for row in rows}


def _journal(session: SparkSession, options: dict[str, str]) -> DataFrame:
    return session.read.format("taskqueue").options(**options).load()
