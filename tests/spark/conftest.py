"""The Spark session of the whole test run, and the real servers of tests/redis.

Most of these tests need no Spark; a test requests the fixture ``spark`` only for what Spark alone can show.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from taskqueue_spark.session import SMALL_DATA, session
from tests.redis.conftest import (
    make_server,
    redis_acl,
    redis_cluster,
    redis_prefix,
    redis_server,
    redis_url,
    shared_servers,
)
from tests.spark.compiling import compiling

__all__ = [
    "make_server",
    "redis_acl",
    "redis_cluster",
    "redis_prefix",
    "redis_server",
    "redis_url",
    "shared_servers",
]


@pytest.fixture(scope="package", autouse=True)
def sharding() -> Iterator[None]:
    """Enable sharding, because tests of this folder read and redrive the shards of queues."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASKQUEUE_SHARDING", "true")
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Yield the Spark session that all tests share, with two cores and four tries per task.

    Like the commands with little data it compiles nothing, because compiling takes far longer than a test's query. For
    each table a test with the fixture `compiled` runs compiled code, as with large data. A test that changes the
    session's configuration must restore it.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # for every server that the session's Java starts
    conf = SMALL_DATA | {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.memory": "1g",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    with pytest.MonkeyPatch.context() as start:
        start.setenv(
            "TASKQUEUE_SHARDING", "true"
        )  # Python workers inherit the environment of this moment
        spark = session("tests", "local[2,4]", **conf)
    try:
        yield spark
    finally:
        spark.stop()
        patch.undo()


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[None]:
    """Let Spark compile the queries of the test."""
    with compiling(spark):
        yield
