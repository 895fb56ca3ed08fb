"""Servers of Spark's own as processes of the tests: a standalone cluster, and Spark Connect."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark

from taskqueue_spark.java import ensure_java

__all__ = ["LIGHT", "PATIENCE", "cluster", "connect", "environment", "taskqueue"]

PATIENCE = 300.0
_HOME = Path(pyspark.__file__).parent
_SCALA = next((_HOME / "jars").glob("spark-core_*.jar")).name.split("_")[1].rpartition("-")[0]
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
LIGHT = {
    "spark.python.daemon.module": "taskqueue_spark.daemon",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}
"""settings by which little is done in little time"""
_COMMANDS = """
import json, sys
from taskqueue_core.cli import main
for words in json.loads(sys.argv[1]):
    if code := main(["pipeline", *words]):
        sys.exit(code)
"""
_LISTENING = ("--webui-port", "0", "--host", "127.0.0.1")


def environment() -> dict[str, str]:
    """Return what a process of Spark needs to know: where Spark, Java and this Python are."""
    ensure_java()
    return {
        **os.environ,
        "JDK_JAVA_OPTIONS": " ".join(_QUICK),  # for what a script of Spark starts
        "SPARK_HOME": str(_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SCALA_VERSION": _SCALA,
        "PYSPARK_PYTHON": sys.executable,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


@contextmanager
def _java(log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    told = environment()
    home = told.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java") or "java"
    opens = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
    command = [java, "-Xmx512m", *opens, "-cp", f"{_HOME}/jars/*", *words]
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=told, stdout=file, stderr=file, cwd=log.parent)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_OPENED = (
    "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio", "java.util",
    "java.util.concurrent", "java.util.concurrent.atomic", "sun.nio.ch", "sun.nio.cs", "sun.security.action",
    "sun.util.calendar",
)  # fmt: skip
"""what Spark asks of Java, as its own scripts do"""


def _said(log: Path, process: subprocess.Popen[bytes], pattern: str) -> str:
    """Wait until a process says something; return the first group of the pattern."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"{pattern} was not said: {log.read_text(errors='replace')[-2000:]}")


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[str]:
    """A master and some workers of one core each; gives the master's URL."""
    with ExitStack() as running:
        log = folder / "master.log"
        words = ("org.apache.spark.deploy.master.Master", *_LISTENING, "--port", "0")
        process = running.enter_context(_java(log, *words))
        url = _said(log, process, r"Starting Spark master at (spark://\S+)")
        started = []
        for number in range(workers):
            place = folder / f"worker{number}"
            place.mkdir()
            log = place / "worker.log"
            size = ("--cores", "1", "--memory", "1g", "-d", str(place))
            role = "org.apache.spark.deploy.worker.Worker"
            worker = running.enter_context(_java(log, role, *_LISTENING, *size, url))
            started.append((log, worker))
        for log, process in started:
            _said(log, process, r"(Successfully registered) with master")
        yield url


@contextmanager
def connect(folder: Path) -> Iterator[str]:
    """A Spark Connect server on two cores of this machine; gives its URL."""
    log = folder / "connect.log"
    settings = {
        "spark.connect.grpc.binding.port": "0",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        **LIGHT,
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    submit = (
        "org.apache.spark.deploy.SparkSubmit", "--master", "local[2]", *words,
        "--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal",
    )  # fmt: skip
    with _java(log, *submit) as process:
        port = _said(log, process, r"Spark Connect server started at: \S*?:(\d+)")
        yield f"sc://127.0.0.1:{port}"


def taskqueue(*commands: Sequence[str], variables: Mapping[str, str] | None = None) -> list[Any]:
    """Run commands of the pipeline, one after the other in one process; return the JSON that each prints."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS, json.dumps(commands)],
        env={**environment(), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
