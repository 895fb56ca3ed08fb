"""A driver that a test kills: a stream that never gets from the sink's commit to Spark's, and a write half-way.

Arguments: a folder with the stream's source, the URL of the store, its prefix.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taskqueue_spark.session import session
from taskqueue_spark.source import TaskQueueDataSource


def _stuck(folder: str) -> type[Any]:
    """Return the source that gets stuck. Made in a function, so that it travels by value."""

    class Stuck(TaskQueueDataSource):
        @classmethod
        def name(cls) -> str:
            return "stuck"

        def writer(self, schema: Any, overwrite: bool) -> Any:  # noqa: FBT001
            writer: Any = super().writer(schema, overwrite)
            write = writer.write

            def sticking(batches: Iterator[Any]) -> Any:
                def some() -> Iterator[Any]:
                    for number, batch in enumerate(batches):
                        if number == 2:
                            Path(folder, "writing").touch()
                            threading.Event().wait()
                        yield batch

                return write(some())

            writer.write = sticking
            return writer

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: FBT001, N802
            writer: Any = super().streamWriter(schema, overwrite)
            commit = writer.commit

            def sticking(messages: Any, batchId: int) -> None:  # noqa: N803
                commit(messages, batchId)
                Path(folder, "streamed").touch()
                threading.Event().wait()

            writer.commit = sticking
            return writer

    return Stuck


def main(folder: str, url: str, prefix: str) -> None:
    """Run both until killed."""
    conf = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "spark.speculation": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "300",
    }
    spark = session("to kill", "local[4,4]", **conf)
    spark.dataSource.register(_stuck(folder))
    store = {"url": url, "prefix": prefix}
    reading = spark.readStream.schema("task_id STRING, payload STRING, key STRING")
    writing = reading.parquet(f"{folder}/source").writeStream.format("stuck").options(**store)
    writing = writing.option("checkpointLocation", f"{folder}/checkpoint")
    writing.trigger(availableNow=True).start()
    rows = spark.range(3000, 6000, 1, 2).selectExpr(
        "concat('t', id) AS task_id", """concat('{"n":', id, '}') AS payload""", "'k' AS key"
    )
    rows.write.format("stuck").options(**store).mode("append").save()


if __name__ == "__main__":
    main(*sys.argv[1:])
