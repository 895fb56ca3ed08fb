"""The processes that a run starts, and ends: those and no others, each by its own id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_STOP_TIMEOUT = 8.0
_TAIL_LINES = 15


class Child:
    """One process of this program."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.stopping = False
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        self.stopping = True
        self.signal(signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """Ask it to end, and insist after a while."""
        self.stopping = True
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def wait(self) -> int:
        """Wait for its end by itself, and return its exit code."""
        self.stopping = True
        return await self._process.wait()

    async def first_line(self) -> bytes:
        """Return the first line that it printed, if its output is piped."""
        return await self._process.stdout.readline() if self._process.stdout else b""

    def tail(self) -> str:
        """Return the last lines that it logged."""
        try:
            lines = self._log.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_TAIL_LINES:])


class Children:
    """Starts processes in sessions of their own, so that Ctrl-C reaches only their parent, and ends them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._all: list[Child] = []

    @property
    def folder(self) -> Path:
        """A folder that only the owner can look into; it is removed by `end`."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="taskqueue-demo-"))
        return self._folder

    async def start(
        self, name: str, *args: str, env: Mapping[str, str], piped: bool = False
    ) -> Child:
        """Start ``taskqueue`` with ``words``. What it logs goes to a file that only the owner can read."""
        path = self.folder / f"{name}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "taskqueue_cli.demo.child",
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
        """Return a process that ended though nobody asked it to, if there is one."""
        return next(
            (child for child in self._all if not child.running and not child.stopping), None
        )

    async def stop(self) -> None:
        """End the workers, then the server, which was started first."""
        await asyncio.gather(*(child.stop() for child in self._all[1:]))
        await asyncio.gather(*(child.stop() for child in self._all[:1]))

    async def end(self) -> None:
        """Kill what is left, as after a second interrupt, remove the logs, and wait until all are gone."""
        for child in self._all:
            child.signal(signal.SIGKILL)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        await asyncio.gather(*(child.wait() for child in self._all))
