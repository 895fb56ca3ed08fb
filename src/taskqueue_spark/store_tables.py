"""The store's current task states and ledgers, as DataFrames that can be joined with the DataFrame of a journal.

Queues have the same names as in a journal: each shard of a queue has its own name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_core.sharding.generations import Shard
from taskqueue_core.tasks import Ledger
from taskqueue_spark.option_values import OptionValues
from taskqueue_spark.sink.store import STORE_OPTIONS, SparkStore, positions_of

_CHUNK = 250
"""maximum number of tasks in one call to the store"""
_TIME = pa.timestamp("us", tz="UTC")
_STATES = pa.schema(
    {
        "key": pa.string(), "task_id": pa.string(), "state": pa.string(), "attempt": pa.int32(), "since": _TIME,
        "as_of": _TIME,
    }
)  # fmt: skip
_LEDGERS = pa.schema(
    {"key": pa.string(), **dict.fromkeys(Ledger.__struct_fields__, pa.int64()), "as_of": _TIME}
)
_US = 1_000_000


def live_states(df: DataFrame, **options: str) -> DataFrame:
    """Return the current state of each task that ``df`` names by ``key`` and ``task_id``.

    ``state``, ``attempt`` and ``since`` (time of the last change) are null for a task that the store does not know or
    no longer knows. ``as_of``: when the store was queried. Each evaluation of the result queries the store again.
    ``options`` name the store: ``backend``, ``url``, ``urlEnv``, ``prefix``, ``partitions``.
    """
    OptionValues(options, STORE_OPTIONS)
    query = partial(_states, SparkStore.read(options))
    return df.select("key", "task_id").mapInArrow(query, from_arrow_schema(_STATES))


def ledgers(spark: SparkSession, **options: str) -> DataFrame:
    """Return the ledger of each queue: ``key``, the columns of `taskqueue_core.tasks.Ledger` and ``as_of``.

    Each evaluation of the result queries the store again. ``options``: as for `live_states`.
    """
    OptionValues(options, STORE_OPTIONS)
    query = partial(_ledgers, SparkStore.read(options))
    item = spark.range(1, numPartitions=1)
    return item.mapInArrow(query, from_arrow_schema(_LEDGERS))


def _states(store: SparkStore, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with asyncio.Runner() as runner:
        opened = store.opened()
        backend = runner.run(opened.__aenter__())
        try:
            # A remote backend learns the server's clock from the server's first response.
            runner.run(backend.health())
            for batch in batches:
                yield runner.run(_states_of(backend, batch))
        finally:
            runner.run(opened.__aexit__(None, None, None))


def _ledgers(store: SparkStore, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if batch.num_rows:
            yield asyncio.run(_read_ledgers(store))


async def _states_of(backend: Backend, batch: pa.RecordBatch) -> pa.RecordBatch:
    keys, ids = (batch.column(index).to_pylist() for index in range(2))
    requested = round(backend.now() * _US)
    rows: list[dict[str, Any]] = [
        {"key": key, "task_id": task_id, "as_of": requested}
        for key, task_id in zip(keys, ids, strict=True)
    ]
    indexes: dict[str, list[int]] = {}
    for index, (key, task_id) in enumerate(zip(keys, ids, strict=True)):
        if key and task_id:
            indexes.setdefault(key, []).append(index)
    for key, group in indexes.items():
        control = positions_of(backend) if Shard.read(key) else control_of(backend)
        for start in range(0, len(group), _CHUNK):
            part = group[start : start + _CHUNK]
            as_of = round(backend.now() * _US)
            known = await control.statuses(key, *(ids[index] for index in part))
            for index, status in zip(part, known, strict=True):
                rows[index]["as_of"] = as_of
                if status is not None:
                    since = round(status.updated_at * _US)
                    rows[index] |= {
                        "state": status.state.value,
                        "attempt": status.attempt,
                        "since": since,
                    }
    return pa.RecordBatch.from_pylist(rows, _STATES)


async def _read_ledgers(store: SparkStore) -> pa.RecordBatch:
    async with store.opened() as backend:
        control = positions_of(backend)
        rows = []
        for key in await control.queues():
            ledger = await control.ledger(key)
            as_of = round(backend.now() * _US)
            rows.append({"key": key, **msgspec.structs.asdict(ledger), "as_of": as_of})
    return pa.RecordBatch.from_pylist(rows, _LEDGERS)
