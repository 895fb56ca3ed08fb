"""Measure the processor time of commands: ``python benchmarks/commands.py``.

A row is the median of ten processes, each with its user and system time, which other programs on the machine change
far less than the time that passes. The exit code is 1 if a command takes more than its limit.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from processes import RedisServer

from tests.docs.programs import background
from tests.ports import free_port

_RUNS = 10
_COMMAND = [sys.executable, "-m", "taskqueue_cli"]
_ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def _seconds(*words: str, **settings: str) -> float:
    """Run a command, and return its processor time."""
    started = subprocess.Popen(
        [*_COMMAND, *words], env=_ENVIRONMENT | settings, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode:
        raise SystemExit(f"taskqueue {' '.join(words)} ended with {started.returncode}")
    return usage.ru_utime + usage.ru_stime


def _row(name: str, limit: float, *words: str, **settings: str) -> bool:
    """Measure one command, print its row, and return whether it keeps within the limit."""
    _seconds(*words, **settings)  # compiles what is not yet compiled
    found = statistics.median(_seconds(*words, **settings) for _ in range(_RUNS))
    print(f"{name:<40} {found:.2f} s, at most {limit:.2f} s")
    return found <= limit


def main() -> int:
    """Measure the help, and a command that reads through a server and from Redis."""
    url = f"http://127.0.0.1:{free_port()}"
    serve = [*_COMMAND, "serve", "--port", url.rpartition(":")[2], "--log-level", "warning"]
    rows = [_row("taskqueue --help", 0.35, "--help")]
    with background(serve, env=_ENVIRONMENT | {"TASKQUEUE_BACKEND": "memory"}) as server:
        assert server.stdout is not None
        server.stdout.readline()
        rows.append(_row("taskqueue stats --server URL", 0.55, "stats", "--server", url))
    with RedisServer() as redis:
        settings = {"TASKQUEUE_BACKEND": "redis", "TASKQUEUE_REDIS_URL": redis.url}
        rows.append(_row("taskqueue stats, with Redis", 0.9, "stats", **settings))
    return 0 if all(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
