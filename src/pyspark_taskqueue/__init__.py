"""The entry point of ``format("taskqueue")``: Spark imports every module whose name begins with ``pyspark_``."""

from taskqueue_spark.source import TaskQueueDataSource

__all__ = ["DefaultSource"]

DefaultSource = TaskQueueDataSource
