"""Tests of a killed process with its own Spark, on a machine without Java: nothing it did is lost or doubled."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from taskqueue_spark.service import StreamOptions, run
from taskqueue_spark.service.state import load
from tests.redis.servers import RedisServer, wait_until
from tests.spark.as_lines import lines_of
from tests.spark.synthetic import Made, made
from tests.spark.test_service_stream import (
    archived,
    assert_once,
    assert_stuck_for_a_while,
    goes_on,
    verdicts,
)
from tests.spark.test_sink import NUMBER, SCRIPT, expect, keep, stream

pytestmark = pytest.mark.long  # starts another Java, which is slow


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What the killed process has left; each test continues another part of it."""

    folder: Path
    told: dict[str, str]
    """the options of the process's store"""
    made: Made
    """the journal of which the service has read the first half"""
    text: list[bytes]
    """the lines of the journal"""


def without_java(folder: Path) -> dict[str, str]:
    """Return the environment of a machine without Java, but with the other programs that Spark calls."""
    tools = folder / "bin"
    tools.mkdir()
    for place in map(Path, ("/bin", "/usr/bin")):
        for program in place.iterdir():
            link = tools / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return {
        "PATH": str(tools),
        "JDK_JAVA_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HOME": str(folder),
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Killed:
    """Run a process that publishes as a stream and runs the streaming service, and kill it in the middle of both.

    The stream is between the sink's commit and Spark's, and the service is in its third batch.
    """
    folder = tmp_path_factory.mktemp("killed")
    (folder / "source").mkdir()
    keep(folder / "source/0.parquet", 0, NUMBER)
    told = {"url": redis_server.url, "prefix": f"t{secrets.token_hex(5)}"}
    journal = made(3, 60, shards=1)
    text = lines_of(journal.table)
    (folder / "journal.jsonl").write_bytes(b"".join(text[: len(text) // 2]))
    arguments = [sys.executable, str(SCRIPT), *told.values(), str(folder)]
    with (folder / "log").open("wb") as log:
        driver = subprocess.Popen(
            arguments, stdout=log, stderr=log, env=without_java(folder), start_new_session=True
        )

        def shown() -> bool:
            return len([*folder.glob("out/transitions/*")]) > 1 or driver.poll() is not None

        try:
            wait_until(shown, "a commit and two batches", seconds=240)
            assert driver.poll() is None, (folder / "log").read_text()[-5000:]
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # kills its child processes too
            driver.wait()
    assert (folder / "committed").exists()
    return Killed(folder=folder, told=told, made=journal, text=text)


def test_a_session_without_java(killed: Killed) -> None:
    """On a machine without Java, a session starts with the Java of the package and works (G8)."""
    home = Path((killed.folder / "java").read_text())
    assert home.parent == killed.folder / "cache/taskqueue"
    assert home.name.startswith("java-")
    assert [*(killed.folder / "out/transitions").iterdir()]


def test_a_driver_that_is_killed(
    spark: SparkSession, killed: Killed, redis_server: RedisServer
) -> None:
    """After SIGKILL between the sink's commit and Spark's, the stream continues, each task once (G8; fault L1)."""
    checkpoint = killed.folder / "checkpoint"
    expect(redis_server, killed.told["prefix"])
    assert not any((checkpoint / "commits").glob("[0-9]"))
    stream(spark, killed.folder / "source", checkpoint, killed.told)
    assert (checkpoint / "commits" / "0").exists()
    expect(redis_server, killed.told["prefix"])


def test_a_service_that_is_killed(spark: SparkSession, killed: Killed) -> None:
    """Neither SIGKILL, SIGTERM, a lost commit nor a lost checkpoint loses or doubles a row (G11; faults L1, L2)."""
    out = killed.folder / "out"
    assert len(killed.text) // 2 > archived(out).num_rows
    goes_on(spark, killed.folder, killed.made, killed.text)
    options = StreamOptions(
        out=out, source={"path": str(killed.folder / "journal.jsonl")}, once=True
    )
    shutil.rmtree(options.checkpoint)
    again = run(spark, options)
    assert (again.transitions, again.balanced) == (len(killed.text), True)
    assert_once(out, killed.made.table)
    assert verdicts(load(options.state)) == killed.made.truth
    assert_stuck_for_a_while(out)
