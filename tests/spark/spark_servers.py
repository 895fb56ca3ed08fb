"""Spark servers in the Java of the tests' session: a standalone cluster and Spark Connect.

Their clients run in other processes, and so do the executors of the cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from pyspark.sql import SparkSession

from taskqueue_spark.java import ensure_java

PATIENCE = 300.0
_QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
LIGHT = {
    "spark.driver.extraJavaOptions": _QUICK,
    "spark.executor.extraJavaOptions": _QUICK,
    "spark.python.daemon.module": "taskqueue_spark.worker_daemon",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}
"""settings with which small queries run quickly"""
_HOST = "127.0.0.1"
_COMMANDS = """
import json, sys
from taskqueue_cli import main
for words in json.loads(sys.argv[1]):
    if code := main(["pipeline", *words]):
        sys.exit(code)
"""


def _java_of(spark: SparkSession) -> Any:
    """Return the gateway to the session's Java virtual machine."""
    return cast("Any", spark)._jvm


@contextmanager
def cluster(spark: SparkSession, folder: Path, workers: int) -> Iterator[str]:
    """Run a Spark master with workers of one core each, and yield the master's URL.

    Executors are separate processes.
    """
    java = _java_of(spark)
    deploy, conf = java.org.apache.spark.deploy, java.org.apache.spark.SparkConf()
    with ExitStack() as running:
        started = deploy.master.Master.startRpcEnvAndEndpoint(_HOST, 0, 0, conf)
        running.callback(_ended, started._1())
        url = f"spark://{_HOST}:{started._1().address().port()}"
        urls = cast("Any", spark.sparkContext)._gateway.new_array(java.java.lang.String, 1)
        urls[0] = url
        for number in range(workers):
            place = folder / f"worker{number}"
            place.mkdir()
            size, none = (1, 1024), java.scala.Option.empty()
            worker = deploy.worker.Worker.startRpcEnvAndEndpoint(
                _HOST, 0, 0, *size, urls, str(place), java.scala.Option.apply(number), conf, none
            )
            running.callback(_ended, worker)
        end = time.monotonic() + PATIENCE
        while _alive(started._2()) < workers:
            assert time.monotonic() < end, "the workers have not registered with the master"
            time.sleep(0.05)
        yield url


def _alive(port: int) -> int:
    """Return how many workers the master reports as alive."""
    with urllib.request.urlopen(f"http://{_HOST}:{port}/json/", timeout=PATIENCE) as answer:
        return int(json.load(answer)["aliveworkers"])


def _ended(environment: Any) -> None:
    environment.shutdown()
    environment.awaitTermination()


@contextmanager
def connect(spark: SparkSession) -> Iterator[str]:
    """Run a Spark Connect server inside the tests' session, and yield its URL."""
    java = _java_of(spark)
    service = java.org.apache.spark.sql.connect.service.SparkConnectService
    service.start(cast("Any", spark)._jsc.sc())
    try:
        module = getattr(java.org.apache.spark.sql.connect.service, "SparkConnectService$")
        yield f"sc://{_HOST}:{getattr(module, 'MODULE$').localPort()}"
    finally:
        service.stop(java.scala.Option.empty(), java.scala.Option.empty())


def taskqueue(*commands: Sequence[str], variables: Mapping[str, str] | None = None) -> list[Any]:
    """Run pipeline commands one after the other in one process, and return the JSON output of each."""
    ensure_java()
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS, json.dumps(commands)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, **(variables or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
