"""The streaming service: it archives a journal as it grows, stores metrics of time windows, and raises alerts.

`batches` processes a batch (archive, aggregate, commit), with `aggregate` in Spark and `update` in plain Python.
`process` runs the query and reports its progress, and `alerts` reports conditions.

::

    OUT/transitions/batch=…/date=…/  every transition, once; a batch is visible as a whole or not at all
    OUT/damaged/batch=…/             entries that could not be read
    OUT/metrics/date=…/HH.parquet    metrics per queue and window
    OUT/stream/alerts.jsonl          start and end of each episode
    OUT/stream/status.json           the progress
    OUT/stream/state.json, open/     the state, and the live tasks
    OUT/stream/checkpoint/           the checkpoint of Spark
"""

from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.process import Summary, run

__all__ = ["StreamOptions", "Summary", "run"]
