"""Dispatchers in processes of their own, which end themselves or get signals."""

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
    """A dispatcher's process."""

    def __init__(self, pid: int, ended: asyncio.Future[bytes]) -> None:
        self._pid = pid
        self._ended = ended

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if not self._ended.done():
            os.kill(self._pid, number)

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
        return int(await asyncio.shield(self._ended))


@contextmanager
def started() -> Iterator[subprocess.Popen[bytes]]:
    """Give what has imported everything, which takes a while, and starts dispatchers."""
    words = [sys.executable, "-m", "tests.dispatch.killed_program"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=_ROOT, stdin=pipe, stdout=pipe) as parent:
        try:
            yield parent
        finally:
            parent.kill()


@asynccontextmanager
async def process(parent: subprocess.Popen[bytes], told: Told) -> AsyncIterator[Process]:
    """Give a dispatcher's process, ready."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    line = parent.stdout.readline
    parent.stdin.write(msgspec.json.encode(told) + b"\n")
    parent.stdin.flush()
    pid = int(await asyncio.to_thread(line))
    if await asyncio.to_thread(line) != b"ready\n":
        os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"process {pid} did not get ready")
    child = Process(pid, asyncio.ensure_future(asyncio.to_thread(line)))
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
