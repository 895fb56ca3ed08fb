"""Starting, watching and ending the child processes of a demo.

When this module is run as a program, it behaves like ``taskqueue``, but also ends when its parent process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

_STOP_TIMEOUT = 8.0
_TAIL_LINES = 15
_STDIN = 0


class Child:
    """A child process that runs a ``taskqueue`` command."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.stopping = False
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is running. It may take a moment until this property reflects an exit."""
        return self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process and wait until it has ended."""
        self.stopping = True
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """Send SIGTERM, and after eight seconds SIGKILL; wait until the process has ended."""
        self.stopping = True
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def wait(self) -> int:
        """Wait until the process ends by itself, and return its exit code."""
        self.stopping = True
        return await self._process.wait()

    async def first_line(self) -> bytes:
        """Wait for the first line that the process prints on stdout; empty if stdout is not piped."""
        return await self._process.stdout.readline() if self._process.stdout else b""

    def tail(self) -> str:
        """Return the last lines of the process's log file."""
        try:
            lines = self._log.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])


class Children:
    """All child processes of a demo. Each has a session of its own, so that Ctrl-C signals only the parent process."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(
            prefix="taskqueue-demo-", ignore_cleanup_errors=True
        )
        self._all: list[Child] = []

    @property
    def folder(self) -> Path:
        """A temporary folder that only the owner can read; `end` removes it."""
        return Path(self._temporary.name)

    async def start(
        self, name: str, *args: str, env: Mapping[str, str], piped: bool = False
    ) -> Child:
        """Start ``taskqueue`` with arguments. Its log is written to a file that only the owner can read."""
        path = self.folder / f"{name}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "taskqueue_cli.demo_frame.processes",
                *args,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if piped else log,
                stderr=log,
                env=dict(env),
                start_new_session=True,
            )
        finally:
            os.close(log)
        child = Child(name, process, path)
        self._all.append(child)
        return child

    def ended(self) -> Child | None:
        """Return a process that ended although it was not stopped, or None."""
        return next(
            (child for child in self._all if not child.running and not child.stopping), None
        )

    async def stop(self) -> None:
        """Stop all processes. The first one, the server, is stopped last, because workers need it until they end."""
        await asyncio.gather(*(child.stop() for child in self._all[1:]))
        await asyncio.gather(*(child.stop() for child in self._all[:1]))

    async def end(self) -> None:
        """Kill the processes that are still running, for example after a second Ctrl-C, and remove the folder."""
        for child in self._all:
            child.signal(signal.SIGKILL)
        self._temporary.cleanup()
        await asyncio.gather(*(child.wait() for child in self._all))


def _end_with_parent() -> None:
    # The parent never writes to this pipe. The read returns when the parent ends, even if the parent was killed.
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    runpy.run_module("taskqueue_cli", run_name="__main__", alter_sys=True)
