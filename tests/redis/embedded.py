"""What tests of the embedded store share."""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.parse import unquote

from taskqueue_redis.embedded.binaries import Binary, inspect
from taskqueue_redis.embedded.server import EmbeddedRedis
from tests.redis.engines import Engine
from tests.redis.resp import Resp


def binary_of(engine: Engine) -> Binary:
    """Return what `EmbeddedRedis` takes."""
    found = inspect(engine.binary)
    assert found is not None
    return found


def ask(redis: EmbeddedRedis) -> Resp:
    """Connect by the URL, as a client would."""
    return Resp(Path(unquote(redis.url.removeprefix("unix://"))))


def call(redis: EmbeddedRedis, *words: str) -> object:
    """Send one command."""
    with ask(redis) as connection:
        return connection.call(*words)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for yet does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False)
    return bool(state.stdout.strip()) and not state.stdout.startswith(b"Z")


def children(pid: int) -> list[int]:
    """Return the ids of a process's children that run."""
    words = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        rows = [line.split() for line in listing.stdout]
    return [
        int(child)
        for child, parent, state in rows
        if int(parent) == pid and int(child) != listing.pid and not state.startswith("Z")
    ]
