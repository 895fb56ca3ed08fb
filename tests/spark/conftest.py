"""One Spark for the whole test run, and the real servers that tests/redis has.

Most of what is here needs no Spark: a test asks for ``spark`` only for what Spark alone can show.
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
    """Switch shards on: tests of this folder read and redrive shards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TASKQUEUE_SHARDING", "true")
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session that all tests share: two cores, and a task that fails is tried four times.

    It is set as the commands set theirs for little data, of which nothing is compiled: that takes far longer than a
    test's work. Each table has a test that is `compiled`, as large data is. Who sets something on it sets it back.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # whatever its Java listens on
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
        )  # Python workers have the environment of their start
        spark = session("tests", "local[2,4]", **conf)
    try:
        yield spark
    finally:
        spark.stop()
        patch.undo()


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[None]:
    """What Spark does in the test is compiled."""
    with compiling(spark):
        yield
