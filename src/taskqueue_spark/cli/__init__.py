"""Analyze a journal with Spark: lost tasks, latency, failures, capacity. Load and redrive tasks in bulk.

The command group ``taskqueue pipeline``, loaded through the entry-point group ``taskqueue.commands``.
"""

from taskqueue_spark.cli.commands import add_to

__all__ = ["add_to"]
