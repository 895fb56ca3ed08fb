"""Tests of ``taskqueue pipeline load`` and ``redrive``, with a journal in a real Redis."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from taskqueue_core.errors import InvalidInput
from taskqueue_redis import RedisBackend, RedisSettings
from taskqueue_spark.cli.bulk import as_tasks
from tests.cli.conftest import Cli
from tests.spark.test_cli import _nowhere, cli, on_spark

__all__ = ["_nowhere", "cli", "on_spark"]


@pytest.fixture
def settings(redis_url: str, redis_prefix: str, monkeypatch: pytest.MonkeyPatch) -> RedisSettings:
    """Return the settings of a store that commands find through environment variables."""
    monkeypatch.setenv("TASKQUEUE_BACKEND", "redis")
    monkeypatch.setenv("TASKQUEUE_REDIS_URL", redis_url)
    monkeypatch.setenv("TASKQUEUE_REDIS_PREFIX", redis_prefix)
    return RedisSettings()


async def _journaling(settings: RedisSettings) -> None:
    backend = RedisBackend(settings=settings)
    found = await backend.control.settings("q")
    await backend.control.configure("q", found.model_copy(update={"journal": True}))
    await backend.aclose()


async def _fail_all(settings: RedisSettings) -> list[Any]:
    backend = RedisBackend(settings=settings)
    payloads = []
    async with backend.subscribe(["q"], "w") as taking:
        for delivery in (await taking.receive(100, 0)).deliveries:
            payloads.append(json.loads(delivery.task.payload))
            await taking.dead_letter(delivery, "rejected", error="ValueError: 7")
    await backend.aclose()
    return payloads


@pytest.mark.usefixtures("on_spark")
def test_a_file_becomes_tasks_and_the_dead_are_tried_again(
    settings: RedisSettings, cli: Cli, tmp_path: Path
) -> None:
    """G8: tasks that are loaded twice are stored once.

    All dead letters of a failure can be redriven, as the store confirms (G9).
    """
    asyncio.run(_journaling(settings))
    rows = tmp_path / "rows.csv"
    rows.write_text("number,name,priority\n1,a,5\n2,b,\n3,c,1\n")
    words = ("load", str(rows), "--queue", "q", "--id", "number", "--json")
    done = cli(*words)
    assert done.code == 0, done.err
    assert done.json == {"confirmed": 3, "duplicate": 0, "conflict": 0, "invalid": 0}
    assert cli(*words).json["duplicate"] == 3
    payloads = asyncio.run(_fail_all(settings))
    assert min(payloads, key=lambda one: str(one["name"])) == {"number": "1", "name": "a"}

    done = cli("redrive", "--all", "--backend", "redis", "--json")
    assert done.json == {"found": 3, "redriven": 3, "passed": 0}
    done = cli("audit", "--backend", "redis", "--json")
    assert done.code == 0, done.err
    (row,) = done.json["conservation"]
    assert (row["published"], row["waiting"], row["dead_lettered"]) == (3, 3, 0)
    assert done.json["asked"]
    (ledger,) = done.json["ledgers"]
    assert ledger["agrees"]


def test_columns_find_their_place_in_a_task(spark: SparkSession) -> None:
    """G8: a struct payload becomes JSON, other columns are combined into a payload, and an id column is required."""
    rows = spark.createDataFrame([("a", 7, "x")], "id string, n int, tenant string")
    (row,) = as_tasks(rows, "id").collect()
    assert (row.task_id, row.tenant, json.loads(row.payload)) == ("a", "x", {"id": "a", "n": 7})
    rows = spark.sql(
        "select 'a' as task_id, named_struct('x', 1) as payload, '3' as priority, 'z' as more"
    )
    (row,) = as_tasks(rows, "task_id").collect()
    assert (row.payload, row.priority, "more" in row) == ('{"x":1}', 3, False)
    with pytest.raises(InvalidInput, match="--id"):
        as_tasks(rows, "nothing")
