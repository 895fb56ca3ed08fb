"""A chaos run of streams: readers over HTTP, while the worker, the server and the store are killed and cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.tasks import Task
from tests.chaos.proxy import FaultProxy
from tests.chaos.world import CONFIG
from tests.ports import free_port
from tests.redis.backends import opened, until
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.redis.serving import SOURCE, Serving, serving

FAULTS = ("worker", "server", "link", "store", "server", "store")
"""what is killed or cut, one after another"""
_KEY = "tell"
_PREFIX = "streams"
_PAUSE = 0.02
"""seconds between two events of a task"""
_PATIENCE = 120.0
_ROOT = str(Path(__file__).parents[2])


class Seen(msgspec.Struct, frozen=True):
    """An event as a reader gets it."""

    id: str
    kind: str
    value: Any


class Reader:
    """Reads the server-sent events of a task, and connects again with the last id until the end."""

    def __init__(self, port: int, path: str) -> None:
        """Create a reader that has read nothing."""
        self.events: list[Seen] = []
        self.connects = 0
        self.open = asyncio.Event()
        """while it is not set, the reader is slow: it reads no further"""
        self.open.set()
        self._port = port
        self._path = path

    async def run(self) -> None:
        """Read until the end."""
        while not (self.events and self.events[-1].kind == "end"):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._read()
            await asyncio.sleep(0.05)

    async def _read(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            self.connects += 1
            last = f"last-event-id: {self.events[-1].id}\r\n" if self.events else ""
            head = f"GET {self._path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n{last}\r\n"
            writer.write(head.encode())
            event = b""
            while line := await reader.readline():
                await self.open.wait()
                if line.startswith(b"data: "):
                    event = line[6:]
                elif event and line == b"\n":  # otherwise the connection broke within the event
                    self.events.append(msgspec.json.decode(event, type=Seen))
                    event = b""
        finally:
            writer.close()


def violations(events: Sequence[Seen], number: int) -> list[str]:
    """Return what breaks law 12 in the events of a task that streams ``number`` events."""
    found: list[str] = []
    places = [tuple(map(int, event.id.split("-"))) for event in events]
    for (attempt, at), (later, after) in pairwise([(0, 0), *places]):
        if after != at + 1 or later < attempt:
            found.append(f"{later}-{after} follows {attempt}-{at}")
    expected = -1  # no attempt has begun
    for event in events[:-1]:
        if event.kind == "attempt":
            expected = 0
        elif (event.kind, event.value) == ("data", expected):
            expected += 1
        else:
            found.append(f"{event} in place of {expected}")
    if expected != number:
        found.append(f"the last attempt has {expected} events of {number}")
    if not events or (events[-1].kind, events[-1].value) != ("end", "done"):
        found.append(f"the last event is {events[-1:]}")
    return found


class Outcome(msgspec.Struct, frozen=True):
    """What the readers of a run have got."""

    violations: list[str]
    connects: int
    attempts: int
    """number of times that tasks were begun"""
    memory: list[int]
    """resident memory of the server after each fault, in MiB"""


@asynccontextmanager
async def _working(url: str, concurrency: int) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ("worker", "tests.chaos.programs.streams:tasks", "--concurrency", str(concurrency))
    variables = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{_ROOT}", "TASKQUEUE_SERVER_URL": url}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taskqueue_cli", *words),
        stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, **variables},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _Run:
    """The processes of a run. A server that was killed is started again at once, and so are the others."""

    def __init__(self, folder: Path, store: RedisServer, link: FaultProxy, tasks: int) -> None:
        self.port = free_port()
        self._folder = folder
        self._store = store
        self._link = link
        self._tasks = tasks
        self._stack = AsyncExitStack()
        self._server: Serving
        self._worker: asyncio.subprocess.Process

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        await self._serve()
        await self._work()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _serve(self) -> None:
        started = serving(
            self._folder,
            *("--port", str(self.port)),
            backend="redis",
            redis_prefix=_PREFIX,
            redis_url=f"redis://127.0.0.1:{self._link.address[1]}",
            lease="3",
        )
        self._server = await self._stack.enter_async_context(started)

    async def _work(self) -> None:
        started = _working(f"http://127.0.0.1:{self.port}", self._tasks)
        self._worker = await self._stack.enter_async_context(started)

    async def inflict(self, fault: str) -> None:
        """Carry out a fault, and let what it has hit come back."""
        match fault:
            case "worker":
                self._worker.kill()
                await self._worker.wait()
                await self._work()
            case "server":
                self._server.send(signal.SIGKILL)
                await self._server.ended()
                await self._serve()
            case "link":
                self._link.refuse()
                self._link.cut()
                await asyncio.sleep(1)  # an outage lasts
                self._link.heal()
            case _:
                self._store.kill()
                await asyncio.to_thread(self._store.start)

    def memory(self) -> int:
        """Return the resident memory of the server, in MiB."""
        pages = int(Path(f"/proc/{self._server.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


async def carry_out(folder: Path, *, tasks: int, number: int) -> Outcome:
    """Read ``number`` events of each task while the faults happen, one reader of which is slow until the last fault."""
    (folder / "server").mkdir(parents=True)
    with RedisServer(find_engine(), folder / "redis", config=CONFIG) as store:
        link = await FaultProxy(("127.0.0.1", store.port)).start()
        async with aclosing(link), opened(store.url, _PREFIX) as backend:
            wide = QueueSettings(stream_events=100_000, stream_bytes=64 * 2**20, max_losses=100)
            await backend.control.configure(_KEY, wide)
            async with _Run(folder / "server", store, link, tasks) as run:
                load = {"number": number, "pause": _PAUSE}
                ids = [f"t{n}" for n in range(tasks)]
                await backend.publisher.publish(*(Task.of(_KEY, load, id=each) for each in ids))
                readers = [Reader(run.port, f"/v1/tasks/{_KEY}/{each}/events") for each in ids]
                async with asyncio.timeout(_PATIENCE), asyncio.TaskGroup() as group:
                    for reader in readers:
                        group.create_task(reader.run())
                    memory = await _inflict_all(run, readers, number)
    return Outcome(
        violations=[text for reader in readers for text in violations(reader.events, number)],
        connects=sum(reader.connects for reader in readers),
        attempts=sum(event.kind == "attempt" for reader in readers for event in reader.events),
        memory=memory,
    )


async def _inflict_all(run: _Run, readers: Sequence[Reader], number: int) -> list[int]:
    """Carry out each fault when the readers have got more events, so that it hits tasks that stream."""
    memory: list[int] = []
    readers[0].open.clear()
    for fault in FAULTS:
        before = sum(len(reader.events) for reader in readers)
        await until(
            lambda: sum(len(one.events) for one in readers) - before >= number // 4,  # noqa: B023
            "readers go on",
            within=_PATIENCE,
        )
        memory.append(run.memory())
        await run.inflict(fault)
    readers[0].open.set()
    return memory
