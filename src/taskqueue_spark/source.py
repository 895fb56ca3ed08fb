"""``format("taskqueue")``: journals, dead letters and live tasks as DataFrames, and DataFrames as tasks.

This module is imported for whoever uses any Python source, so it imports little.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)  # fmt: skip
from pyspark.sql.types import StructType


class TaskQueueDataSource(DataSource):
    """The source and sink. Spark finds it by itself where this package is installed.

    What is read is told by the option ``resource``: ``journal`` (unless told), ``dead_letters`` or ``tasks``. A
    journal is read at once or as a stream; the others at once. Tasks are written at once or as a stream.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "taskqueue"

    def schema(self) -> StructType:
        """Return the columns of what is read. Raises `InvalidInput`."""
        from taskqueue_spark.options import resource_of  # noqa: PLC0415 - as the module says

        resource = resource_of(self.options)
        if resource == "journal":
            from taskqueue_spark.batch_reader import spark_schema  # noqa: PLC0415

            return spark_schema()
        from taskqueue_spark import task_reader  # noqa: PLC0415

        return task_reader.schema(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader. Raises `InvalidInput`."""
        from taskqueue_spark.options import ReadOptions, resource_of  # noqa: PLC0415

        if resource_of(self.options) != "journal":
            from taskqueue_spark import task_reader  # noqa: PLC0415

            return task_reader.reader(self.options, schema)
        from taskqueue_spark.batch_reader import FilteringReader, JournalReader  # noqa: PLC0415

        options = ReadOptions.of(self.options)
        # Spark refuses every read of a reader that takes filters where it does not pass them on.
        return (FilteringReader if options.pushdown else JournalReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a reader of a journal that grows. Raises `InvalidInput`."""
        from taskqueue_core.errors import InvalidInput  # noqa: PLC0415
        from taskqueue_spark.options import ReadOptions, resource_of  # noqa: PLC0415
        from taskqueue_spark.stream_reader import JournalStream  # noqa: PLC0415

        if resource_of(self.options) != "journal":
            raise InvalidInput("resource", "what is not read as a stream", "journal")
        return JournalStream(ReadOptions.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark's signature
        """Return a writer of tasks. Raises `InvalidInput`."""
        from taskqueue_spark.sink import writer as writing  # noqa: PLC0415

        return writing.writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802, FBT001 - as above
        """Return a writer of tasks as they come. Raises `InvalidInput`."""
        from taskqueue_spark.sink import writer as writing  # noqa: PLC0415

        return writing.stream_writer(self.options, schema, overwrite)
