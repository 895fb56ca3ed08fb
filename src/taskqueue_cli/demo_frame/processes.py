"""Starting and ending the child processes of a demo.

When this module is run as a program, it behaves like ``taskqueue``, but also ends when its parent process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import runpy
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Self

import msgspec

_STOP_TIMEOUT = 8.0
_TAIL_LINES = 15
_STDIN = 0


class Child(msgspec.Struct, eq=False):
    """A child process that runs a ``taskqueue`` command."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    stopped: bool = False
    """whether `stop` was called"""

    @classmethod
    async def start(
        cls, folder: Path, name: str, *args: str, env: Mapping[str, str], piped: bool = False
    ) -> Self:
        """Start ``taskqueue`` with arguments. Its log is written to ``folder``, to a file that only the owner can read.

        The process has a session of its own, so that Ctrl-C signals only the parent process.
        """
        path = folder / f"{name}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "taskqueue_cli.demo_frame.processes", *args),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE if piped else log,
                stderr=log,
                env=dict(env),
                start_new_session=True,
            )
        finally:
            os.close(log)
        return cls(name, process, path)

    @property
    def failed(self) -> bool:
        """Whether the process has ended although `stop` was not called."""
        return self.process.returncode is not None and not self.stopped

    def signal(self, number: Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def stop(self, number: Signals = SIGTERM) -> None:
        """Send a signal, and SIGKILL if the process has not ended after eight seconds. Wait until it has ended."""
        self.stopped = True
        self.signal(number)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self.process.wait()
        except TimeoutError:
            self.signal(SIGKILL)
            await self.process.wait()

    async def first_line(self) -> bytes:
        """Return the first line that the process prints on stdout; empty if it prints nothing or is not piped."""
        return await self.process.stdout.readline() if self.process.stdout else b""

    def tail(self) -> str:
        """Return the last lines of the process's log file."""
        try:
            lines = self.log.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])


def _end_with_parent() -> None:
    # The parent never writes to this pipe. The read returns when the parent ends, even if the parent was killed.
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    runpy.run_module("taskqueue_cli", run_name="__main__", alter_sys=True)
