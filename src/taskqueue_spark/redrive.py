"""Redriving or discarding dead letters in bulk. Each row of a DataFrame names a dead letter by key and task id.

A row whose task is not (or no longer) a dead letter is skipped. A retried Spark task, a replayed micro-batch and a
second run therefore change nothing, unless the task became a dead letter again in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as spark
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from taskqueue_core.capabilities import DeadLetters, dead_letters_of
from taskqueue_core.limits import check_name
from taskqueue_core.sharding.generations import Shard
from taskqueue_spark.sink.feed import messages_of
from taskqueue_spark.sink.options import RedriveOptions
from taskqueue_spark.sink.tasks import COLUMNS, check_columns

_log = logging.getLogger("taskqueue.spark")
_COLUMNS = {name: COLUMNS[name] for name in ("key", "task_id")}


@dataclass(frozen=True)
class Moved(WriterCommitMessage):
    """The counts of rows by result."""

    moved: int = 0
    """number of dead letters that were redriven or discarded"""
    passed: int = 0
    """number of rows that were skipped, because their tasks are not dead letters, for example after an earlier run"""

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.moved + other.moved, self.passed + other.passed)


class RedriveWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """A writer that redrives or discards the dead letters that the rows of a DataFrame or stream name."""

    def __init__(self, options: Mapping[str, str], schema: spark.StructType) -> None:
        """Create a writer for rows with this schema. Raises `InvalidInput` or `ConfigurationError`."""
        self._options = RedriveOptions.read(options)
        needed = ["task_id"] if self._options.queue else ["task_id", "key"]
        check_columns(schema, _COLUMNS, needed)
        self._names = tuple(schema.names)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Moved:
        with asyncio.Runner() as runner:
            return runner.run(self._move(iterator))

    async def _move(self, batches: Iterator[pa.RecordBatch]) -> Moved:
        rows = moved = 0
        waiting: dict[str, list[str]] = {}
        async with self._options.store.opened() as backend:
            dead_letters = dead_letters_of(backend)
            for batch in batches:
                rows += batch.num_rows
                for key, task_id in self._pairs(batch):
                    ids = waiting.setdefault(key, [])
                    ids.append(task_id)
                    if len(ids) >= self._options.chunk:
                        moved += await self._apply(dead_letters, key, ids)
                        ids.clear()
            for key, ids in waiting.items():
                moved += await self._apply(dead_letters, key, ids)
        return Moved(moved, rows - moved)

    async def _apply(self, dead_letters: DeadLetters, key: str, ids: list[str]) -> int:
        if not ids:
            # Do not call the store without ids, because such a call concerns all dead letters.
            return 0
        verb = dead_letters.redrive if self._options.action == "redrive" else dead_letters.discard
        return await verb(key, *ids)

    def _pairs(self, batch: pa.RecordBatch) -> Iterator[tuple[str, str]]:
        ids = batch.column(self._names.index("task_id")).to_pylist()
        keys: list[str | None] = [None] * len(ids)
        if "key" in self._names:
            keys = batch.column(self._names.index("key")).to_pylist()
        for given, task_id in zip(keys, ids, strict=True):
            key = self._options.queue if given is None else given
            check_name("key", key)
            check_name("task_id", task_id)
            # A journal names the shard of a queue, but dead letters belong to the whole queue.
            shard = Shard.read(str(key))
            yield (str(key) if shard is None else shard.key), task_id

    def commit(self, messages: list[WriterCommitMessage | None], *_: object) -> None:
        total = sum((message for message in messages if isinstance(message, Moved)), Moved())
        _log.info("%s: %s moved, %s skipped", self._options.action, total.moved, total.passed)

    def abort(self, *_: object) -> None:
        """Do nothing: dead letters that were redriven or discarded cannot be restored."""


def redrive(df: DataFrame, **options: str) -> Moved:
    """Redrive the dead letters that ``df`` names by ``key`` and ``task_id``, and return the counts.

    ``options``: as for ``df.write.format("taskqueue").option("resource", "dead_letters")``; ``action="discard"``
    discards the dead letters. Raises `InvalidInput` or `ConfigurationError` before anything is changed.
    """
    writer = RedriveWriter(options, df.schema)
    return sum(messages_of(df, writer.write, Moved), Moved())
