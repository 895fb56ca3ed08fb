"""Run workers in separate processes."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from taskqueue_redis.embedded.watchdog import Watchdog

_PROGRAM = Path(__file__).with_name("program.py")


@asynccontextmanager
async def program(url: str, *words: str) -> AsyncIterator[Process]:
    """Run ``program.py`` as a worker of a server.

    The process ends with the block at the latest, and also if the test run is killed.
    """
    with closing(Watchdog("KILL")) as watchdog:
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(_PROGRAM), url, *words, stdout=DEVNULL, stderr=PIPE
        )
        watchdog.watch(child.pid)
        try:
            yield child
        finally:
            if child.returncode is None:
                child.kill()
            await child.communicate()
