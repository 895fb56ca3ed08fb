"""Run commands in separate processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from taskqueue_redis.embedded.watchdog import Watchdog

ROOT = Path(__file__).parents[2]


@contextmanager
def process(*words: str, stderr: int | None = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process whose output is not a terminal.

    The process ends with the block at the latest, and also if the test run is killed.
    """
    with (
        closing(Watchdog("KILL", group=True)) as watchdog,
        subprocess.Popen(
            [sys.executable, "-m", "taskqueue_cli", *words, "--json", "--log-level", "error"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        ) as started,
    ):
        watchdog.watch(started.pid)
        try:
            yield started
        finally:
            started.kill()
