"""One Spark for the whole test run, and the real servers that tests/redis has.

Most of what is here needs no Spark: a test asks for ``spark`` only for what Spark alone can show.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from taskqueue_spark.session import session
from tests.redis.conftest import (
    certificates,
    engines,
    make_server,
    redis_acl,
    redis_cluster,
    redis_prefix,
    redis_server,
    redis_url,
    shared_servers,
)

__all__ = [
    "certificates",
    "engines",
    "make_server",
    "redis_acl",
    "redis_cluster",
    "redis_prefix",
    "redis_server",
    "redis_url",
    "shared_servers",
]

_QUICK_TO_START = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session that all tests share: two cores, and a task that fails is tried four times.

    Who sets something on it sets it back.
    """
    conf = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": _QUICK_TO_START,
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    spark = session("tests", "local[2,4]", **conf)
    try:
        yield spark
    finally:
        spark.stop()
