"""The sink: rows become tasks, published by the backend's own publisher, so that laws, limits and journal hold.

Nothing here is exactly once, and need not be: publishing is idempotent by key and id while the task lives and for its
queue's ``dedupe_window`` after. So a task of Spark that is tried again, a speculative copy of one, a micro-batch that
is replayed after a crash and a new checkpoint all publish the same ids again, and there is one copy of each. What a
replay may be older than is said by the option ``replayHorizon``, and checked.

A row that is published stays published, whatever becomes of the job: workers may have it by then. So `abort` takes
nothing back; write the same rows again instead.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from taskqueue_core.errors import BackendUnavailable, ConfigurationError
from taskqueue_core.tasks import Published
from taskqueue_spark.redrive import RedriveWriter, StreamRedriveWriter
from taskqueue_spark.sink.feed import Feed, demand_window, messages_of
from taskqueue_spark.sink.options import SinkOptions, resource_of
from taskqueue_spark.sink.rejected_rows import Aside, job_of, reveal, sweep
from taskqueue_spark.sink.tasks import TaskReader

_log = logging.getLogger("taskqueue.spark")
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):
    """What became of one partition's rows, or of all: each is in one of the first four counts."""

    confirmed: int = 0
    duplicate: int = 0
    """known already: published before, most often by an earlier try at the same rows"""
    conflict: int = 0
    """their ids belong to tasks with other payloads"""
    invalid: int = 0
    """no tasks"""
    refused: int = 0
    """of those above, how many had to wait for room"""
    partition: int = 0
    query: str = ""
    hidden: str = ""

    def __add__(self, other: Sent) -> Sent:
        """Sum the counts."""
        return Sent(*(getattr(self, name) + getattr(other, name) for name in _COUNTS))


_COUNTS = ("confirmed", "duplicate", "conflict", "invalid", "refused")


class _Publishing:
    """What the batch and the stream sink have in common."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._reader = TaskReader.of(schema, options.queue)
        self._job = secrets.token_hex(8)

    async def check_store(self) -> None:
        """Raise `BackendUnavailable` if the store is unavailable, `ConfigurationError` if its queue does not fit.

        Who writes is patient with a store that it has heard of; a wrong address had better be told at once.
        """
        queue = self._options.queue
        async with self._options.store.opened() as backend:
            health = await backend.health()
            if not health.ok:
                why = health.details.get("error") or "no reason given"
                raise BackendUnavailable(
                    f"nothing was written, because the store is unavailable: {why}"
                )
            if queue is not None:
                await demand_window(backend, queue, self._options.replay_horizon)

    def reached(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Look, from where it will be written."""
        for _ in iterator:
            asyncio.run(self.check_store())
        return Sent()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Publish the rows of one partition."""
        with asyncio.Runner() as runner:
            return runner.run(self._publish(iterator))

    async def _publish(self, batches: Iterator[pa.RecordBatch]) -> Sent:
        chunk, invalid = self._options.chunk, 0
        with Aside(self._options.invalid_path, self._job) as aside:
            async with (
                self._options.store.opened() as backend,
                Feed(backend, self._options) as feed,
            ):
                async for batch in _arriving(batches):
                    for start in range(0, batch.num_rows, chunk):
                        part = batch.slice(start, chunk)
                        rows = self._reader.read(part)
                        if rows.bad and self._options.on_invalid == "fail":
                            raise rows.errors[0]
                        invalid += len(rows.bad)
                        aside.put(part, rows.bad, [str(error) for error in rows.errors])
                        await feed.send(rows.tasks)
        context = TaskContext.get()
        return Sent(
            confirmed=feed.counts[Published.ACCEPTED],
            duplicate=feed.counts[Published.DUPLICATE],
            conflict=feed.counts[Published.CONFLICT],
            invalid=invalid,
            refused=feed.counts[Published.REFUSED],
            partition=context.partitionId() if context else 0,
            query=(context.getLocalProperty(_QUERY) or "" if context else ""),
            hidden=aside.name,
        )

    def _commit(self, messages: list[WriterCommitMessage | None], of: str) -> None:
        sent = [message for message in messages if isinstance(message, Sent)]
        folder = self._options.invalid_path
        aside = [item for item in sent if item.hidden] if folder is not None else []
        for item in aside:
            name = "-".join(filter(None, (item.query, of, f"{item.partition:05}")))
            reveal(str(folder), item.hidden, name)
        for job in {job_of(item.hidden) for item in aside}:
            sweep(str(folder), job)
        total = sum(sent, Sent())
        _log.info("published: %s", ", ".join(f"{getattr(total, n):,} {n}" for n in _COUNTS))

    def _abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Take nothing back: workers may have the tasks. Spark calls this after a commit that failed, too."""
        if self._options.invalid_path is not None:
            sent = [message for message in messages if isinstance(message, Sent)]
            # Spark may have made another writer for this than for the tasks.
            for job in {self._job, *(job_of(item.hidden) for item in sent if item.hidden)}:
                sweep(self._options.invalid_path, job)


async def _arriving(batches: Iterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
    """Give batches as Spark gives them: what waits for room in the meantime is not held up by a slow job."""
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        yield batch


class _BatchWriter(_Publishing, DataSourceArrowWriter):
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, self._job)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class _StreamWriter(_Publishing, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        context = TaskContext.get()
        if context is not None and context.getLocalProperty(_BATCH) == "0":
            asyncio.run(self.check_store())  # later ones wait for a store that there was
        return super().write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._commit(messages, str(batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - Spark's name
        self._abort(messages)


def writer(
    options: Mapping[str, str],
    schema: StructType,
    overwrite: bool,  # noqa: FBT001 - Spark's call
) -> DataSourceArrowWriter:
    """Return what writes a DataFrame. Raises `InvalidInput` or `ConfigurationError` before anything is written."""
    _demand_append(overwrite)
    if resource_of(options) == "dead_letters":
        return RedriveWriter.of(options, schema)
    result = _BatchWriter(SinkOptions.read(options), schema)
    asyncio.run(result.check_store())
    return result


def stream_writer(
    options: Mapping[str, str],
    schema: StructType,
    overwrite: bool,  # noqa: FBT001 - Spark's call
) -> DataSourceStreamArrowWriter:
    """Return what writes the micro-batches of a stream, in the same way."""
    _demand_append(overwrite)
    if resource_of(options) == "dead_letters":
        return StreamRedriveWriter.of(options, schema)
    return _StreamWriter(SinkOptions.read(options), schema)


def publish(df: DataFrame, **options: str) -> Sent:
    """Publish the rows of ``df`` and return what became of them.

    ``options`` and columns: as of ``df.write.format("taskqueue")``. The tasks of a queue are published in the order of
    each partition's rows. Raises `InvalidInput` or `ConfigurationError` before anything is written; what goes wrong on
    the way is Spark's to tell.
    """
    batch = _BatchWriter(SinkOptions.read(options), df.schema)
    item = df.sparkSession.range(1, numPartitions=1)
    messages_of(item, batch.reached, Sent)
    try:
        sent = messages_of(df, batch.write, Sent)
        batch.commit([*sent])
    except BaseException:
        batch.abort([])
        raise
    return sum(sent, Sent())


def _demand_append(overwrite: bool) -> None:  # noqa: FBT001 - as Spark says it
    if overwrite:
        raise ConfigurationError(
            "mode overwrite: a queue cannot be overwritten, because its tasks may be "
            "running; use append. To remove waiting tasks, purge the queue"
        )
