"""Programs that tests kill: a stream that hangs between the sink's commit and Spark's, and a write that kills itself.

The process of the stream also runs the streaming service. Arguments: the URL of the store, its prefix, and for the
stream the folder of its files; without a folder the write is run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import types

from taskqueue_spark.service import StreamOptions, run
from taskqueue_spark.session import SMALL_DATA, session
from taskqueue_spark.sink import writer as writing
from taskqueue_spark.source import TaskQueueDataSource


def _stuck(folder: str) -> type[Any]:
    """Return a data source that hangs after a commit. It is defined in a function, so that it is pickled by value."""

    class Stuck(TaskQueueDataSource):
        @classmethod
        def name(cls) -> str:
            return "stuck"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: FBT001, N802
            writer: Any = super().streamWriter(schema, overwrite)
            commit = writer.commit

            def sticking(messages: Any, batchId: int) -> None:  # noqa: N803
                commit(messages, batchId)
                Path(folder, "committed").touch()
                threading.Event().wait()

            writer.commit = sticking
            return writer

    return Stuck


def stream(store: dict[str, str], folder: Path) -> None:
    """Publish with a stream that hangs after its commit, then archive a journal as the service does, until killed."""
    assert "JAVA_HOME" not in os.environ
    conf = {
        "spark.driver.memory": "1g",
        "spark.speculation": "true",
        "spark.sql.shuffle.partitions": "2",
    }
    spark = session("to kill", "local[2,4]", **SMALL_DATA, **conf)
    (folder / "java").write_text(os.environ["JAVA_HOME"])
    spark.dataSource.register(_stuck(str(folder)))
    reading = spark.readStream.schema("task_id STRING, payload STRING, key STRING")
    rows = reading.parquet(f"{folder}/source").writeStream.format("stuck").options(**store)
    rows = rows.option("checkpointLocation", f"{folder}/checkpoint")
    query = rows.trigger(availableNow=True).start()
    while not (folder / "committed").exists():
        assert not query.awaitTermination(1), "the query ended"
    source = {"path": str(folder / "journal.jsonl")}
    run(spark, StreamOptions(out=folder / "out", source=source, trigger=0.1, max_events=40))


def write(store: dict[str, str]) -> None:
    """Publish 4,000 of 6,000 rows as a partition's task does, and then kill this process."""

    def batches() -> Iterator[pa.RecordBatch]:
        for first in range(0, 6000, 1000):
            if first == 4000:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pa.record_batch({"task_id": [f"t{n}" for n in range(first, first + 1000)]})

    schema = types.StructType().add("task_id", types.StringType())
    writing.writer(store | {"queue": "k"}, schema, overwrite=False).write(batches())


if __name__ == "__main__":
    url, prefix, *folders = sys.argv[1:]
    if folders:
        stream({"url": url, "prefix": prefix}, Path(folders[0]))
    else:
        write({"url": url, "prefix": prefix})
