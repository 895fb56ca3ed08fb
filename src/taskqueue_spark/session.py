"""Spark sessions with the settings that this package needs."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.java import ensure_java

_ALL_NODES = {
    "spark.sql.session.timeZone": "UTC",  # the times in a journal are in UTC
    "spark.sql.python.filterPushdown.enabled": "true",  # without it, Spark rejects readers that accept filters
    "spark.python.sql.dataFrameDebugging.enabled": "false",  # recording source lines makes calls twice as slow
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # many readers do not support the default, INT96
}
_LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.log.level": "ERROR",
    "spark.python.daemon.module": "taskqueue_spark.worker_daemon",
    "spark.sql.shuffle.partitions": str(max(2, os.cpu_count() or 2)),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
SMALL_DATA = {
    # With TieredStopAtLevel=1, the JVM's code cache defaults to 48 MB. Spark outgrows it, and the JVM then keeps
    # discarding and recompiling code.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
}
"""settings for small data, for which Java's compiler costs more time than it saves"""


def session(
    name: str, master: str | None = None, remote: str | None = None, **conf: str
) -> SparkSession:
    """Return a Spark session. An existing session of this process is reused, with ``conf`` set on it.

    ``master``: the master URL of Spark. Default: all cores of this machine, with four attempts per Spark task.
    ``remote``: a Spark Connect server (``sc://host:port``) instead of a master. ``conf``: Spark settings, which
    override those of this module.

    Raises `ConfigurationError` if there is no suitable Java, or if both a master and a remote are set.
    """
    if master is not None and remote is not None:
        raise ConfigurationError("master, remote: both are set; allowed: at most one of them")
    builder = SparkSession.builder.appName(name)
    settings = dict(_ALL_NODES)
    if remote is not None:
        builder = builder.remote(remote)
    else:
        master = master or "local[*,4]"
        builder = builder.master(master)
        ensure_java()
        if master.startswith("local"):
            settings |= _LOCAL
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for setting, value in (settings | conf).items():
        builder = builder.config(setting, value)
    return builder.getOrCreate()
