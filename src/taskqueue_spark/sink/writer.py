"""The sink: it publishes rows as tasks through the backend's publisher, which enforces limits and writes the journal.

Spark may send a row several times. This has no effect while the task exists and for the ``dedupe_window`` of its queue
afterwards; the option ``replayHorizon`` checks that the window is long enough. A published task stays published even if
the job fails, because a consumer may already have it. `TaskWriter.abort` therefore withdraws no task.
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
from taskqueue_spark.option_values import OptionValues
from taskqueue_spark.redrive import RedriveWriter
from taskqueue_spark.sink.feed import Feed, check_window, messages_of
from taskqueue_spark.sink.options import SinkOptions
from taskqueue_spark.sink.rejected_rows import RejectedRows, job_of, reveal, sweep
from taskqueue_spark.sink.tasks import TaskReader

_log = logging.getLogger("taskqueue.spark")
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@dataclass(frozen=True)
class Sent(WriterCommitMessage):
    """The counts of rows in one partition, or in all partitions. Each row is in one of the first four counts."""

    confirmed: int = 0
    duplicate: int = 0
    """number of rows that had been published before, usually by an earlier attempt to write the same rows"""
    conflict: int = 0
    """number of rows whose ids belong to tasks with another payload"""
    invalid: int = 0
    """number of rows that are not valid tasks"""
    refused: int = 0
    """number of rows, among those counted above, that had to wait for a full queue"""
    partition: int = 0
    query: str = ""
    hidden: str = ""

    def __add__(self, other: Sent) -> Sent:
        return Sent(*(getattr(self, name) + getattr(other, name) for name in _COUNTS))


_COUNTS = ("confirmed", "duplicate", "conflict", "invalid", "refused")


class TaskWriter(DataSourceArrowWriter, DataSourceStreamArrowWriter):
    """A writer that publishes the rows of a DataFrame, or of the micro-batches of a stream."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        self._reader = TaskReader.of(schema, options.queue)
        self._job = secrets.token_hex(8)

    async def check_store(self) -> None:
        """Raise `BackendUnavailable` if the store is down, and `ConfigurationError` if the queue forgets ids too soon.

        Writing waits for a store during an outage; this check reports a wrong address at once.
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
                await check_window(backend, queue, self._options.replay_horizon)

    def check_from_executor(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        """Check the store from a Spark worker, because only Spark workers write to it. The driver may lack access."""
        for _ in iterator:
            asyncio.run(self.check_store())
        return Sent()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        context = TaskContext.get()
        with asyncio.Runner() as runner:
            if context is not None and context.getLocalProperty(_BATCH) == "0":
                # Check only the first batch of a stream; later batches wait for a store that is unavailable.
                runner.run(self.check_store())
            return runner.run(self._publish(iterator))

    async def _publish(self, batches: Iterator[pa.RecordBatch]) -> Sent:
        chunk, invalid = self._options.chunk, 0
        with RejectedRows(self._options.invalid_path, self._job) as rejected:
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
                        rejected.put(part, rows.bad, [str(error) for error in rows.errors])
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
            hidden=rejected.name,
        )

    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: N803 - Spark defines this signature
    ) -> None:
        sent = [message for message in messages if isinstance(message, Sent)]
        batch = self._job if batchId is None else str(batchId)
        if self._options.invalid_path is not None:
            for item in sent:
                if item.hidden:
                    name = "-".join(filter(None, (item.query, batch, f"{item.partition:05}")))
                    reveal(self._options.invalid_path, item.hidden, name)
            self._sweep({job_of(item.hidden) for item in sent if item.hidden})
        total = sum(sent, Sent())
        _log.info("published: %s", ", ".join(f"{getattr(total, n):,} {n}" for n in _COUNTS))

    def abort(self, messages: list[WriterCommitMessage | None], *_: object) -> None:
        """Remove hidden files, but no tasks: consumers may have them. Spark also calls this after a failed commit."""
        hidden = [item.hidden for item in messages if isinstance(item, Sent) and item.hidden]
        # Spark may call this method on a different writer than the one that wrote the rows.
        self._sweep({self._job, *map(job_of, hidden)})

    def _sweep(self, jobs: set[str]) -> None:
        if self._options.invalid_path is not None:
            for job in jobs:
                sweep(self._options.invalid_path, job)


async def _arriving(batches: Iterator[pa.RecordBatch]) -> AsyncIterator[pa.RecordBatch]:
    """Yield Spark's batches without blocking the event loop, so that waiting tasks are published in the meantime."""
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        yield batch


def writer(
    options: Mapping[str, str],
    schema: StructType,
    overwrite: bool,  # noqa: FBT001 - Spark passes this argument by position
    *,
    stream: bool = False,
) -> TaskWriter | RedriveWriter:
    """Return the writer for a DataFrame or stream; write nothing.

    Raises `InvalidInput`, `ConfigurationError` or, for a DataFrame, `BackendUnavailable`.
    """
    if overwrite:
        raise ConfigurationError(
            "mode overwrite: a queue cannot be overwritten, because its tasks may be "
            "running; use mode append. To remove waiting tasks, purge the queue"
        )
    if OptionValues(options).choice("resource", "tasks", "dead_letters") == "dead_letters":
        return RedriveWriter(options, schema)
    result = TaskWriter(SinkOptions.read(options), schema)
    if not stream:
        asyncio.run(result.check_store())
    return result


def publish(df: DataFrame, **options: str) -> Sent:
    """Publish the rows of ``df``, and return the counts of the results.

    ``options`` and columns: as for ``df.write.format("taskqueue")``. The tasks of a queue are published in the order
    of the rows of each partition. Raises `InvalidInput` or `ConfigurationError` before anything is written, and
    Spark's errors if writing fails.
    """
    batch = TaskWriter(SinkOptions.read(options), df.schema)
    item = df.sparkSession.range(1, numPartitions=1)
    messages_of(item, batch.check_from_executor, Sent)
    try:
        sent = messages_of(df, batch.write, Sent)
        batch.commit([*sent])
    except BaseException:
        batch.abort([])
        raise
    return sum(sent, Sent())
