"""The module through which Spark finds ``format("taskqueue")``: Spark imports every module named ``pyspark_…``."""

from taskqueue_spark.source import TaskQueueDataSource

__all__ = ["DefaultSource"]

DefaultSource = TaskQueueDataSource
