"""The processes of a measurement: a private Redis on one core, and the entry's producer and worker on another core."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from entries.adapter import PlainRedis

from taskqueue_redis.embedded.binaries import find_binary

PATIENCE = 120.0
"""seconds for one command of an entry"""


class Failed(Exception):
    """An entry or Redis failed to execute a command. The message is the message of the entry or of Redis."""


def cores() -> tuple[int, int] | None:
    """Return the cores for Redis and for clients; ``None`` if they cannot be separated."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[1]) if len(allowed) > 1 else None


def pin(pid: int, which: int) -> None:
    """Keep a process and all its threads on core ``which`` of `cores`."""
    if (chosen := cores()) is None:
        return
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), {chosen[which]})


class RedisServer:
    """An empty Redis server on loopback, which the context stops: the embedded Valkey, or else a server on PATH."""

    def __init__(self, *, durable: bool = False) -> None:
        self._durable = durable
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Start the server, and return when it responds."""
        self.binary = find_binary()
        folder = self._opened.enter_context(tempfile.TemporaryDirectory(prefix="taskqueue-bench-"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        words += ["--appendonly", "yes" if self._durable else "no", "--appendfsync", "everysec"]
        self.url = f"redis://127.0.0.1:{port}/0"
        self.process = subprocess.Popen([self.binary.path, *words], stdout=subprocess.DEVNULL)
        self._opened.callback(self._end)
        pin(self.process.pid, 0)
        self.ask = self._connected()
        self._opened.callback(self.ask.close)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self._opened.close()

    def _connected(self) -> PlainRedis:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(OSError):
                ask = PlainRedis(self.url)
                # Another program may have taken the port in the meantime.
                if f"process_id:{self.process.pid}\r" in ask("INFO", "server"):
                    return ask
                ask.close()
            time.sleep(0.005)
        self._opened.close()
        raise Failed("the store does not answer, or its port was taken")

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()


class EntryProcess:
    """A process of an entry: its producer or its worker."""

    def __init__(
        self, python: str, script: Path, mode: str, url: str, variables: dict[str, str]
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as this
        self.process = subprocess.Popen(
            [python, "-u", str(script), mode, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=variables,
            text=True,
        )

    def ready(self) -> dict[str, str]:
        """Wait until the process is ready, pin it to its core, and return the versions of the packages it uses."""
        versions: dict[str, str] = self.answer()["ready"]
        pin(self.process.pid, 1)
        return versions

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Execute a command in the process, and return its response."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command; `answer` returns the response later."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise Failed(self._said()) from None

    def answer(self, patience: float = PATIENCE) -> Any:
        """Return the next response. Raises `Failed` if the process reports an error, ends, or takes too long."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + patience
        while True:
            if not select.select([self.process.stdout], [], [], deadline - time.monotonic())[0]:
                raise Failed(f"no answer within {patience:.0f} s: {self._said()}")
            line = self.process.stdout.readline()
            if not line:
                raise Failed(self._said())
            with suppress(ValueError):  # the library may print other lines
                answer = json.loads(line)
                break
        if isinstance(answer, dict) and "error" in answer:
            raise Failed(answer["error"])
        return answer

    def close(self) -> None:
        """End the process by closing its stdin; kill it if that does not help."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def _said(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        if "-v" in sys.argv:
            print(*lines, sep="\n", file=sys.stderr)
        return lines[-1] if lines else "it ended without a word"
