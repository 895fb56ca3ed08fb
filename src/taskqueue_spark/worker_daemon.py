"""The process that forks Spark's Python workers. It imports modules before the fork, which halves the start-up time."""

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
