"""The Spark data source ``format("taskqueue")``: it reads journals, dead letters and tasks, and writes tasks.

Spark imports this module for every Python data source, so the module imports others of this package only when they
are needed.
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
    """The data source and sink, which Spark finds if this package is installed.

    The option ``resource`` names what to read: ``journal`` (the default), ``dead_letters`` or ``tasks``. A journal can
    be read in a batch or as a stream, the other two only in a batch. Writing rows, in a batch or as a stream, publishes
    them as tasks; if ``resource`` is ``dead_letters``, it redrives or discards the dead letters that the rows name.
    """

    @classmethod
    def name(cls) -> str:
        return "taskqueue"

    def schema(self) -> StructType:
        from taskqueue_spark.options import resource_of  # noqa: PLC0415 - Spark often imports this module, which must be fast

        resource = resource_of(self.options)
        if resource == "journal":
            from taskqueue_spark.batch_reader import spark_schema  # noqa: PLC0415

            return spark_schema()
        from taskqueue_spark import task_reader  # noqa: PLC0415

        return task_reader.TasksOptions.read(self.options).schema

    def reader(self, schema: StructType) -> DataSourceReader:
        from taskqueue_spark.options import ReadOptions, resource_of  # noqa: PLC0415

        if resource_of(self.options) != "journal":
            from taskqueue_spark import task_reader  # noqa: PLC0415

            return task_reader.StoreReader(self.options, schema)
        from taskqueue_spark.batch_reader import FilteringReader, JournalReader  # noqa: PLC0415

        options = ReadOptions.of(self.options)
        # By default, Spark rejects the reader that accepts filters, so use it only if pushdown is requested.
        return (FilteringReader if options.pushdown else JournalReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark defines this signature
        from taskqueue_core.errors import InvalidInput  # noqa: PLC0415
        from taskqueue_spark.options import ReadOptions, resource_of  # noqa: PLC0415
        from taskqueue_spark.stream_reader import JournalStream  # noqa: PLC0415

        if resource_of(self.options) != "journal":
            raise InvalidInput(
                "option resource", "a resource that cannot be read as a stream", "journal"
            )
        return JournalStream(ReadOptions.of(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001 - Spark defines this signature
        from taskqueue_spark.sink.writer import writer  # noqa: PLC0415

        return writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802, FBT001 - Spark defines this signature
        from taskqueue_spark.sink.writer import writer  # noqa: PLC0415

        return writer(self.options, schema, overwrite, stream=True)
