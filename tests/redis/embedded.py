"""Helpers for the tests of the embedded store."""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.parse import unquote

from taskqueue_redis.embedded.binaries import Binary, inspect
from taskqueue_redis.embedded.server import EmbeddedRedis
from tests.redis.engines import Engine
from tests.redis.resp import Resp


def binary_of(engine: Engine) -> Binary:
    """Return the server program of an engine, in the form that `EmbeddedRedis` expects."""
    found = inspect(engine.binary)
    assert found is not None
    return found


def ask(redis: EmbeddedRedis) -> Resp:
    """Connect to an embedded store by its URL."""
    return Resp(Path(unquote(redis.url.removeprefix("unix://"))))


def call(redis: EmbeddedRedis, *words: str) -> object:
    """Send one command to an embedded store and return the reply."""
    with ask(redis) as connection:
        return connection.call(*words)


def alive(pid: int) -> bool:
    """Return whether a process is running; a zombie does not count as running."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith(b"Z")


def children(pid: int) -> list[int]:
    """Return the ids of the running child processes of a process."""
    words = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        rows = [line.split() for line in listing.stdout]
    return [
        int(child)
        for child, parent, state in rows
        if int(parent) == pid and int(child) != listing.pid and not state.startswith("Z")
    ]
