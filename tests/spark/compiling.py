"""Whether Spark compiles what it does: as the commands have it where there is much data, not as the tests have it."""

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
    """What is done within is compiled."""
    for name, value in _AS_SPARK_HAS_IT.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in _AS_SPARK_HAS_IT:
            spark.conf.set(name, SMALL_DATA[name])
