"""The streaming service: it archives a journal as it grows, stores metrics of time windows, and raises alerts.

`batches` processes a batch (archive, aggregate, commit), with `aggregate` in Spark and `update` in plain Python.
`process` runs the query and reports its progress, and `alerts` reports conditions. The section "The streaming service"
of docs/pipeline.md lists the files that they write.
"""

from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.process import Summary, run

__all__ = ["StreamOptions", "Summary", "run"]
