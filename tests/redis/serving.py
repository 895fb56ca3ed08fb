"""Running ``taskqueue serve`` as a child process, as operators do, with access to its output and log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.server.support import Worker, eventually

SOURCE = str(Path(__file__).parents[2] / "src")
SECONDS = 60.0
"""upper limit of seconds for starting or ending processes on a busy machine"""


class Serving:
    """A running ``taskqueue serve`` process."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self._log = log
        self.told: dict[str, Any] = {}

    @property
    def url(self) -> str:
        """The URL on which the server listens."""
        return str(self.told["url"])

    def log(self) -> str:
        """Return what the server has logged so far."""
        return self._log.read_text("utf-8")

    def pids(self) -> list[int]:
        """Return the ids of all server processes so far, in the order in which they became ready."""
        return [
            int(pid) for pid in re.findall(r"event='server process ready' pid=(\d+)", self.log())
        ]

    def worker(self, worker_id: str, key: str = "k", **hello: Any) -> Worker:
        """Return a worker client that connects to any of the server processes."""
        url = self.url.replace("http", "ws") + "/v1/socket"
        return Worker(url, {"worker_id": worker_id, "keys": [key], **hello})

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the main process."""
        self.process.send_signal(number)

    async def logs(self, text: str, times: int = 1) -> None:
        """Wait until the log contains a text this many times."""
        await eventually(lambda: self.log().count(text) >= times, SECONDS)

    async def ended(self, seconds: float = SECONDS) -> int:
        """Wait until the main process ends, and return its exit code."""
        return await asyncio.wait_for(self.process.wait(), seconds)


@asynccontextmanager
async def serving(
    folder: Path, *words: str, ready: bool = True, **variables: str
) -> AsyncIterator[Serving]:
    """Start the server in ``folder`` with ``variables`` as settings, and kill it at the end if it is still running."""
    log = folder / "serve.log"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TASKQUEUE_GRACE": "0.2"}
    environment |= {f"TASKQUEUE_{name.upper()}": value for name, value in variables.items()}
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "taskqueue_cli", "serve", "--port", "0", "--json", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=folder,
        )
    assert process.stdout is not None
    it = Serving(process, log)
    try:
        if ready:
            line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
            assert line, it.log()
            it.told = json.loads(line)
            assert "url" in it.told, line  # an error message has no "url"
        yield it
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def alive(pid: int) -> bool:
    """Return whether a process exists that is not a child of this process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
