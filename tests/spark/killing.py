"""One process that is killed, for all tests that look what becomes of what it was doing: a start of Spark is dear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.redis.servers import RedisServer, wait_until
from tests.spark.as_lines import lines_of
from tests.spark.synthetic import Made, made

__all__ = ["NUMBER", "SCRIPT", "Killed", "keep", "killed_in"]

NUMBER = 6000
SCRIPT = Path(__file__).with_name("sink_to_kill.py")


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What is left of it."""

    folder: Path
    told: dict[str, str]
    """the options of its store"""
    made: Made
    """the journal of which the service read the first half"""
    text: list[bytes]
    """its lines"""


def keep(file: Path, first: int, end: int) -> None:
    """Write rows of tasks into a file."""
    numbers = range(first, end)
    rows = {
        "task_id": [f"t{n}" for n in numbers],
        "payload": [f'{{"n":{n}}}' for n in numbers],
        "key": ["k"] * len(numbers),
    }
    pq.write_table(pa.table(rows), file)


def without_java(folder: Path) -> dict[str, str]:
    """Return the environment of a machine that has no Java, but all else that Spark and its libraries call."""
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


def killed_in(folder: Path, server: RedisServer, prefix: str) -> Killed:
    """Have a process publish as a stream and run the service, on a machine without Java; kill it in the midst of both.

    The stream is between the sink's commit and Spark's, and the service is in its third batch.
    """
    (folder / "source").mkdir()
    keep(folder / "source/0.parquet", 0, NUMBER)
    told = {"url": server.url, "prefix": prefix}
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
            wait_until(shown, "a commit, and two batches", seconds=240)
            assert driver.poll() is None, (folder / "log").read_text()[-5000:]
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # and what it has started
            driver.wait()
    assert (folder / "committed").exists()
    return Killed(folder=folder, told=told, made=journal, text=text)
