"""Where Spark's Python workers come from: what they need is loaded once, before the first is forked.

Spark starts it by its name, which a session sets: so a worker is of use in half the time.
"""

from __future__ import annotations

from importlib import import_module

from pyspark.daemon import manager

LOADED = (
    "pandas",
    "pyarrow",
    "pyspark.sql.datasource",
    "taskqueue_spark.journals.lines",
    "taskqueue_spark.journals.redis",
    "taskqueue_spark.stream_reader",
)

if __name__ == "__main__":
    for name in LOADED:
        import_module(name)
    manager()
