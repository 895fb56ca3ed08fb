"""Spark sessions as the commands of this package use them."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession

from taskqueue_core.errors import ConfigurationError
from taskqueue_spark.java import ensure_java

_ALL_NODES = {
    "spark.sql.session.timeZone": "UTC",  # what the journal's times are in
    "spark.sql.python.filterPushdown.enabled": "true",  # off, a reader that takes filters cannot be used
    "spark.python.sql.dataFrameDebugging.enabled": "false",  # it notes the line of each call, which takes as long again
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # what else reads these files knows no INT96
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
LITTLE = {
    # By itself Java has 48 MB for the code of this level, which Spark fills: then it sweeps and compiles in circles.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
}
"""for little data, which is done sooner than Java has compiled how to do it best"""


def session(
    name: str, master: str | None = None, remote: str | None = None, **conf: str
) -> SparkSession:
    """Return a session; an existing one of this process is taken over, with ``conf`` set on it.

    ``master``: where Spark runs, as Spark writes it; unless set, all cores of this machine, and a task that fails is
    tried four times. ``remote``: a Spark Connect server (``sc://host:port``) in place of a master. ``conf``: settings
    of Spark, which win over what is set here.

    Raises `ConfigurationError` where there is no Java, or both a master and a remote.
    """
    if master is not None and remote is not None:
        raise ConfigurationError("master, remote: both are set; allowed: one of them, or none")
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
