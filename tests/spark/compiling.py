"""Switch on Spark's code generation, which the commands use for large data and the tests normally do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from taskqueue_spark.session import SMALL_DATA

_AS_SPARK_HAS_IT = {
    "spark.sql.codegen.factoryMode": "FALLBACK",
    "spark.sql.codegen.wholeStage": "true",
}


@contextmanager
def compiling(spark: SparkSession) -> Iterator[None]:
    """Let Spark compile the queries inside the ``with`` block."""
    for name, value in _AS_SPARK_HAS_IT.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in _AS_SPARK_HAS_IT:
            spark.conf.set(name, SMALL_DATA[name])
