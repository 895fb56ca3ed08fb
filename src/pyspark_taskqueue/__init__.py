"""Where Spark looks for ``format("taskqueue")``: it imports every module whose name begins like this one's."""

from taskqueue_spark.source import TaskQueueDataSource

__all__ = ["DefaultSource"]

DefaultSource = TaskQueueDataSource
