"""What the store says now, as DataFrames to join with what a journal says: the states of tasks, and ledgers.

Queues are named as a journal names them: a shard by its own name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_core.sharding.generations import Shard
from taskqueue_core.tasks import Ledger
from taskqueue_spark.sink.options import given_options
from taskqueue_spark.sink.store import SparkStore, positions_of

_AT_ONCE = 250
"""tasks that are asked for in one call"""
_STATES = "key STRING, task_id STRING, state STRING, attempt INT, since TIMESTAMP, as_of TIMESTAMP"
_LEDGERS = ", ".join(f"{name} BIGINT" for name in Ledger.__struct_fields__)
_TIME = pa.timestamp("us", tz="UTC")
_STATES_ARROW = pa.schema(
    {
        "key": pa.string(), "task_id": pa.string(), "state": pa.string(), "attempt": pa.int32(), "since": _TIME,
        "as_of": _TIME,
    }
)  # fmt: skip
_LEDGERS_ARROW = pa.schema(
    {"key": pa.string(), **dict.fromkeys(Ledger.__struct_fields__, pa.int64()), "as_of": _TIME}
)
_US = 1_000_000


def live_states(df: DataFrame, **options: str) -> DataFrame:
    """Return what the store knows of the tasks that ``df`` names by ``key`` and ``task_id``, a row for each row.

    ``state``, ``attempt`` and ``since`` (of its last change) are null for a task that the store does not know, or has
    forgotten. ``as_of``: when it was asked. Lazy: each evaluation asks anew. ``options`` say which store: ``backend``,
    ``url``, ``urlEnv``, ``prefix``, ``partitions``.
    """
    given_options(options, ())
    asking = _Asking(SparkStore.read(options))
    return df.select("key", "task_id").mapInArrow(asking.states, _STATES)


def ledgers(spark: SparkSession, **options: str) -> DataFrame:
    """Return the ledger of each queue: ``key``, the columns of `taskqueue_core.tasks.Ledger` and ``as_of``. Lazy.

    ``options``: as of `live_states`.
    """
    given_options(options, ())
    asking = _Asking(SparkStore.read(options))
    item = spark.range(1, numPartitions=1)
    return item.mapInArrow(asking.ledgers, f"key STRING, {_LEDGERS}, as_of TIMESTAMP")


class _Asking(msgspec.Struct, frozen=True):
    """Asks the store, on whatever executor it is."""

    store: SparkStore

    def states(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with asyncio.Runner() as runner:
            opened = self.store.opened()
            backend = runner.run(opened.__aenter__())
            try:
                runner.run(_know_time(backend))
                for batch in batches:
                    yield runner.run(_states(backend, batch))
            finally:
                runner.run(opened.__aexit__(None, None, None))

    def ledgers(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield asyncio.run(_ledgers(self.store))


async def _know_time(backend: Backend) -> None:
    await backend.health()  # a backend elsewhere tells its time with its first answer


async def _states(backend: Backend, batch: pa.RecordBatch) -> pa.RecordBatch:
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
        for start in range(0, len(group), _AT_ONCE):
            part = group[start : start + _AT_ONCE]
            as_of = round(backend.now() * _US)
            known = await control.statuses(key, *(ids[index] for index in part))
            for place, status in zip(part, known, strict=True):
                rows[place]["as_of"] = as_of
                if status is not None:
                    since = round(status.updated_at * _US)
                    rows[place] |= {
                        "state": status.state.value,
                        "attempt": status.attempt,
                        "since": since,
                    }
    return pa.RecordBatch.from_pylist(rows, _STATES_ARROW)


async def _ledgers(store: SparkStore) -> pa.RecordBatch:
    async with store.opened() as backend:
        control = positions_of(backend)
        rows = []
        for key in await control.queues():
            ledger = await control.ledger(key)
            as_of = round(backend.now() * _US)
            rows.append({"key": key, **msgspec.structs.asdict(ledger), "as_of": as_of})
    return pa.RecordBatch.from_pylist(rows, _LEDGERS_ARROW)
