"""Dispatchers in separate processes, which kill themselves at a given step or are killed by a test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from tests.dispatch.killed_program import Told

_ROOT = Path(__file__).parents[2]


class Process:
    """A process that runs one dispatcher."""

    def __init__(self, pid: int, ended: asyncio.Future[bytes]) -> None:
        self._pid = pid
        self._ended = ended

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        if not self._ended.done():
            os.kill(self._pid, number)

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        return int(await asyncio.shield(self._ended))


@contextmanager
def started() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a parent process that forks dispatchers; it has already done the slow imports."""
    words = [sys.executable, "-m", "tests.dispatch.killed_program"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=_ROOT, stdin=pipe, stdout=pipe) as parent:
        try:
            yield parent
        finally:
            parent.kill()


@asynccontextmanager
async def process(parent: subprocess.Popen[bytes], told: Told) -> AsyncIterator[Process]:
    """Fork a dispatcher's process, wait until it is ready, and yield it."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    line = parent.stdout.readline
    parent.stdin.write(msgspec.json.encode(told) + b"\n")
    parent.stdin.flush()
    pid = int(await asyncio.to_thread(line))
    if await asyncio.to_thread(line) != b"ready\n":
        os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"process {pid} did not become ready")
    child = Process(pid, asyncio.ensure_future(asyncio.to_thread(line)))
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
