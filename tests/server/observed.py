"""Run a server in a separate process, and observe its memory, file descriptors, asyncio tasks and log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.tasks import Ledger, Task
from taskqueue_remote import RemoteBackend
from tests.server.rude import RawSocket
from tests.server.support import Worker, eventually

PROGRAM = Path(__file__).with_name("observed_program.py")
_TROUBLE = re.compile(
    r"Traceback|never retrieved|never awaited|unhandled|exception|\berror\b", re.IGNORECASE
)
_SECONDS = 20.0


class Looked(msgspec.Struct, frozen=True):
    """Measurements that a server process reports about itself."""

    rss: int
    """resident memory in bytes, after the allocator returned its free memory"""
    fds: int
    tasks: int
    connections: int
    strangers: int
    """number of connections that have not sent a hello"""


class Observed:
    """A server that runs in another process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self._process = process
        self._log = log
        self.url = url

    @property
    def port(self) -> int:
        """Port on which the server listens."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def peak(self) -> int:
        """Peak memory of the process in bytes, since its start or the last call of `forget_peak`."""
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found
        return 1024 * int(found[1])

    def forget_peak(self) -> None:
        """Reset the peak memory, so that `peak` measures from now on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")

    @property
    def alive(self) -> bool:
        """Whether the server process is running."""
        return self._process.returncode is None

    @property
    def log(self) -> str:
        """Everything that the server has logged so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def trouble(self) -> list[str]:
        """Return the log lines that report a fault of the server itself."""
        return [line for line in self.log.splitlines() if _TROUBLE.search(line)]

    def worker(self, worker_id: str = "w", *keys: str, **hello: Any) -> Worker:
        """Return a worker that the test controls by hand; see `support.Running.worker`."""
        url = self.url.replace("http", "ws") + "/v1/socket"
        return Worker(url, {"worker_id": worker_id, "keys": keys or ("k",), **hello})

    async def raw(self, worker_id: str | None = None, *keys: str, **hello: Any) -> RawSocket:
        """Return a raw socket, which has sent a hello if a ``worker_id`` is given."""
        raw = await RawSocket.opened(self.port, **hello.pop("socket", {}))
        if worker_id is not None:
            raw.say("hello", worker_id=worker_id, keys=keys or ("k",), **hello)
            while b'"welcome"' not in await raw.heard():
                pass
        return raw

    async def publish(self, key: str, payloads: Sequence[bytes]) -> None:
        """Publish one task for each payload, with the ids 0, 1, 2 and so on."""
        tasks = [Task(key=key, id=str(n), payload=p) for n, p in enumerate(payloads)]
        backend = RemoteBackend(self.url)
        for start in range(0, len(tasks), 500):
            await backend.publisher.publish(*tasks[start : start + 500])
        await backend.aclose()

    async def look(self) -> Looked:
        """Query the server process for its measurements."""
        return msgspec.convert(await self._ask("look"), Looked)

    async def longest_turn(self, turns: int = 40) -> float:
        """Return the processor seconds of the longest of ``turns`` event loop iterations.

        No other connection is served during one iteration.
        """
        return float((await self._ask(f"turns {turns}"))["seconds"])

    async def ledger(self, key: str) -> Ledger:
        """Return the ledger of a queue, which must balance."""
        found = msgspec.convert(await self._ask(f"ledger {key}"), Ledger)
        assert found.balanced
        return found

    async def reaches(self, key: str, seconds: float = _SECONDS, **counts: int) -> None:
        """Wait until the ledger of a queue has these counts."""

        async def there() -> bool:
            found = await self.ledger(key)
            return all(getattr(found, name) == n for name, n in counts.items())

        await eventually(there, seconds)

    async def settles_to(
        self, before: Looked, *, rss: int = 4 << 20, seconds: float = _SECONDS
    ) -> Looked:
        """Wait until the server is back at the measurements of ``before``; return the new measurements."""
        found = before

        async def there() -> bool:
            nonlocal found
            found = await self.look()
            return (
                found.connections <= before.connections
                and found.fds <= before.fds
                and found.tasks <= before.tasks
                and found.rss <= before.rss + rss
            )

        try:
            await eventually(there, seconds)
        except AssertionError:
            raise AssertionError(f"{found} does not return to {before}") from None
        return found

    async def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(_SECONDS):
            return json.loads(await self._process.stdout.readline())

    def kill(self) -> None:
        """Kill the server process, as a crash would."""
        self._process.kill()

    async def ended(self) -> None:
        """Stop the server gracefully if it is running, and wait for its exit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()
        try:
            await asyncio.wait_for(self._process.wait(), _SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            raise


@asynccontextmanager
async def observed(
    backend: str = "memory",
    variables: Mapping[str, str] | None = None,
    *,
    faultless: bool = True,
    **settings: Any,
) -> AsyncIterator[Observed]:
    """Run a server in another process until the end of the block.

    If ``faultless``, the log of the server must not report a fault.
    """
    chosen = {"port": 0, "lease": 3.0, "grace": 0.2, "drain": 0.5, **settings}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(PROGRAM), backend, json.dumps(chosen),
                stdin=PIPE, stdout=PIPE, stderr=log, cwd=Path(__file__).parents[2],
                env={"PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "error", **(variables or {})},
            )  # fmt: skip
        assert process.stdout is not None
        try:
            line = await process.stdout.readline()
            assert line, path.read_text(encoding="utf-8")
            it = Observed(process, json.loads(line)["url"], path)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
            raise
        try:
            yield it
        finally:
            await it.ended()
        assert not (faultless and it.trouble), it.trouble[:5]


async def eventually_connected(it: Observed, count: int) -> None:
    """Wait until the server has ``count`` connections."""

    async def there() -> bool:
        return (await it.look()).connections == count

    await eventually(there)
