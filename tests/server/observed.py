"""A real server in a process of its own, seen from outside: its memory, descriptors, tasks and log."""

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
    """What a server told about itself."""

    rss: int
    """bytes, once what is free was given back"""
    fds: int
    tasks: int
    connections: int
    strangers: int
    """connections without a hello"""


class Observed:
    """A server that is running elsewhere."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path) -> None:
        self._process = process
        self._log = log
        self.url = url

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def peak(self) -> int:
        """The most memory that it ever had, in bytes; `forget_peak` starts anew."""
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found
        return 1024 * int(found[1])

    def forget_peak(self) -> None:
        """Measure the peak from now on."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.returncode is None

    @property
    def log(self) -> str:
        """All that it has logged."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def trouble(self) -> list[str]:
        """Lines of the log that tell of a fault of its own."""
        return [line for line in self.log.splitlines() if _TROUBLE.search(line)]

    def worker(self, worker_id: str = "w", *keys: str, **hello: Any) -> Worker:
        """A worker by hand, as `support.Running.worker`."""
        url = self.url.replace("http", "ws") + "/v1/socket"
        return Worker(url, {"worker_id": worker_id, "keys": keys or ("k",), **hello})

    async def raw(self, worker_id: str | None = None, *keys: str, **hello: Any) -> RawSocket:
        """A socket of plain bytes, with a hello if there is a ``worker_id``."""
        raw = await RawSocket.opened(self.port, **hello.pop("socket", {}))
        if worker_id is not None:
            raw.say("hello", worker_id=worker_id, keys=keys or ("k",), **hello)
            while b'"welcome"' not in await raw.heard():
                pass
        return raw

    async def publish(self, key: str, payloads: Sequence[bytes]) -> None:
        """Publish tasks, named 0, 1, and so on."""
        tasks = [Task(key=key, id=str(n), payload=p) for n, p in enumerate(payloads)]
        backend = RemoteBackend(self.url)
        for start in range(0, len(tasks), 500):
            await backend.publisher.publish(*tasks[start : start + 500])
        await backend.aclose()

    async def look(self) -> Looked:
        """Ask it about itself."""
        return msgspec.convert(await self._ask("look"), Looked)

    async def longest_turn(self, turns: int = 40) -> float:
        """Processor seconds of the longest of so many turns of its loop: for so long others had to wait."""
        return float((await self._ask(f"turns {turns}"))["seconds"])

    async def ledger(self, key: str) -> Ledger:
        """Its books of a queue, which must balance."""
        found = msgspec.convert(await self._ask(f"ledger {key}"), Ledger)
        assert found.balanced
        return found

    async def reaches(self, key: str, seconds: float = _SECONDS, **counts: int) -> None:
        """Wait until the ledger has these counts."""

        async def there() -> bool:
            found = await self.ledger(key)
            return all(getattr(found, name) == n for name, n in counts.items())

        await eventually(there, seconds)

    async def settles_to(
        self, before: Looked, *, rss: int = 4 << 20, seconds: float = _SECONDS
    ) -> Looked:
        """Wait until nothing is left of what came since; return how it looks then."""
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
            raise AssertionError(f"{found} is left, of {before}") from None
        return found

    async def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(_SECONDS):
            return json.loads(await self._process.stdout.readline())

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()

    async def ended(self) -> None:
        """Stop it in good order, if it runs, and wait for its end."""
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
    """Run a server elsewhere until the end of the block. Its log must not tell of a fault, if it is ``faultless``."""
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
    """Wait until so many are connected."""

    async def there() -> bool:
        return (await it.look()).connections == count

    await eventually(there)
