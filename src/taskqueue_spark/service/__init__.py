"""The streaming service: archives a journal as it grows, keeps figures of windows, and tells what is amiss.

A batch goes through `batches` (archive, fold, commit), `folding` (in Spark) and `advancing` (what is known after
it); `running` is the process around them, `alerts` says when somebody should look.

::

    OUT/transitions/batch=…/date=…/  every transition, once; a batch is seen whole or not at all
    OUT/damaged/batch=…/             what could not be read
    OUT/metrics/date=…/HH.parquet    figures per queue and window
    OUT/stream/alerts.jsonl          start and end of each episode
    OUT/stream/status.json           how far it is
    OUT/stream/state.json, open/     what is known, and the tasks that live
    OUT/stream/checkpoint/           Spark's own
"""

from taskqueue_spark.service.options import StreamOptions
from taskqueue_spark.service.process import Summary, run

__all__ = ["StreamOptions", "Summary", "run"]
