"""Count the functions that run during one call: ``python benchmarks/path_length.py [memory|redis|server ...]``.

A hop is a function below ``src/`` that is entered at least once. The table shows functions, files and, through the
server, calls of each path, each as ``measured/target``. The exit status is 1 if a number is above its target.
``--list`` also prints the functions of each path.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core.assembly import open_backend
from taskqueue_core.config import Settings
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Delivery
from taskqueue_server import ServerProcess
from taskqueue_worker import Worker
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

_ROOT = Path(__file__).resolve().parents[1]
_SOURCE = f"{_ROOT / 'src'}{os.sep}"
_KEY = "path"
_WARM_UP = 3
_RUNS = 3
_SECONDS = 10.0
_QUIET_SECONDS = 0.03
"""seconds without entering a function, after which a path through several asyncio tasks counts as ended"""


class Size(NamedTuple):
    """The numbers of functions, files and calls of one path, or their upper limits."""

    functions: int
    files: int
    calls: int | None = None  # no limit


TARGETS = {
    "memory": {
        "publish": Size(34, 12),
        "receive": Size(20, 10),
        "ack": Size(18, 10),
        "retry": Size(24, 11),
    },
    "redis": {
        "publish": Size(40, 15),
        "receive": Size(32, 14),
        "ack": Size(26, 12),
        "retry": Size(30, 14),
    },
    "server": {"HTTP publish to socket to ack": Size(230, 55, 420)},
}


class Recording:
    """The functions of the project that have been called, with the number of calls of each."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], int] = {}

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Count a call. Resuming a coroutine or a generator also counts as a call."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_SOURCE):
            name = (code.co_filename.removeprefix(_SOURCE), code.co_qualname)
            self.calls[name] = self.calls.get(name, 0) + 1

    @property
    def total(self) -> int:
        """The total number of calls."""
        return sum(self.calls.values())

    @property
    def size(self) -> Size:
        """The numbers of functions, files and calls."""
        return Size(len(self.calls), len({file for file, _ in self.calls}), self.total)


@contextmanager
def record() -> Iterator[Recording]:
    """Record the functions that are called during the block, in all threads if this Python version can."""
    recording = Recording()
    set_profile: Callable[[Any], None] = sys.setprofile
    if sys.version_info >= (3, 12):  # a worker runs its handlers in a thread
        set_profile = threading.setprofile_all_threads
    set_profile(recording.note)
    try:
        yield recording
    finally:
        set_profile(None)


async def measure_backend(name: str) -> dict[str, Recording]:
    """Measure publish, receive, ack and retry on one backend."""
    paths: dict[str, Recording] = {}
    backend = open_backend(name)
    queue = Queue(backend)
    async with backend.subscribe([_KEY], "path-length") as subscription:

        async def receive() -> Delivery:
            return (await subscription.receive(1, _SECONDS)).deliveries[0]

        async def retry(delivery: Delivery, at: float) -> None:
            await backend.publisher.schedule_retry(delivery.task, at, error="e", settles=delivery)

        for _ in range(_WARM_UP):
            await queue.publish(_KEY, {"a": 1})
            await subscription.ack(await receive())
            await queue.publish(_KEY, {"a": 1})
            await retry(await receive(), backend.now())
            await subscription.ack(await receive())
        await asyncio.sleep(_QUIET_SECONDS)
        with record() as paths["publish"]:
            await queue.publish(_KEY, {"a": 1})
        with record() as paths["receive"]:
            received = await subscription.receive(1, _SECONDS)
        with record() as paths["ack"]:
            await subscription.ack(*received.deliveries)
        await queue.publish(_KEY, {"a": 1})
        delivery = await receive()
        at = backend.now()
        publisher = backend.publisher
        with record() as paths["retry"]:
            await publisher.schedule_retry(delivery.task, at, error="e", settles=delivery)
    await backend.aclose()
    return paths


async def measure_redis() -> dict[str, Recording]:
    """Measure the Redis backend on a private Valkey."""
    with (
        tempfile.TemporaryDirectory(prefix="taskqueue-path-") as folder,
        RedisServer(find_engine(), Path(folder) / "store", aof=False) as server,
    ):
        os.environ["TASKQUEUE_REDIS_URL"] = server.url
        return await measure_backend("redis")


@asynccontextmanager
async def _serving(settings: Settings) -> AsyncIterator[ServerProcess]:
    server = ServerProcess(open_backend("memory", settings), settings)
    running = asyncio.create_task(server.run())
    await server.ready.wait()
    try:
        yield server
    finally:
        server.stop()
        await running


async def measure_server() -> dict[str, Recording]:
    """Measure a task from an HTTP request to the ack of a worker; the server and the worker are in this process."""
    async with _serving(Settings(port=0, drain=0.5)) as server:
        worker = Worker(url=server.url, concurrency=1)
        handled: asyncio.Queue[None] = asyncio.Queue()

        @worker.task(_KEY)
        async def handle(a: int) -> int:
            loop.call_soon_threadsafe(handled.put_nowait, None)
            return a

        loop = asyncio.get_running_loop()
        running = asyncio.create_task(worker.serve())
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))

        async def publish() -> None:
            body = json.dumps({"key": _KEY, "payload": {"a": 1}}).encode()
            head = f"POST /v1/tasks HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 20"):
                raise SystemExit(f"the server refused the task: {answer.decode()}")
            (length,) = [
                int(line.partition(b":")[2])
                for line in answer.splitlines()
                if line.lower().startswith(b"content-length")
            ]
            await reader.readexactly(length)
            async with asyncio.timeout(_SECONDS):
                await handled.get()

        for _ in range(_WARM_UP):
            await publish()
        await asyncio.sleep(_QUIET_SECONDS)
        with record() as path:
            await publish()
            calls = -1
            while calls != path.total:
                calls = path.total
                await asyncio.sleep(_QUIET_SECONDS)
        writer.close()
        worker.stop()
        await running
    return {"HTTP publish to socket to ack": path}


MEASUREMENTS = {
    "memory": lambda: measure_backend("memory"),
    "redis": measure_redis,
    "server": measure_server,
}


def _shortest(area: str) -> dict[str, Recording]:
    """Measure an area several times, and return the shortest recording of each path.

    Background work, such as a heartbeat, may run during a call; it is not part of the path.
    """
    runs = [asyncio.run(MEASUREMENTS[area]()) for _ in range(_RUNS)]
    return {name: min((run[name] for run in runs), key=lambda path: path.size) for name in runs[0]}


def main() -> int:
    """Print the table, and return the exit code."""
    arguments = [word for word in sys.argv[1:] if word != "--list"]
    os.chdir(tempfile.gettempdir())  # no settings of the project's folder
    above = False
    print(f"{'path':<40}{'functions':>12}{'files':>10}{'calls':>12}")
    for area in arguments or MEASUREMENTS:
        for name, path in _shortest(area).items():
            target = TARGETS[area][name]
            pairs = [
                f"{number}/{'-' if limit is None else limit}"
                for number, limit in zip(path.size, target, strict=True)
            ]
            over = any(
                limit is not None and (number or 0) > limit
                for number, limit in zip(path.size, target, strict=True)
            )
            above |= over
            print(
                f"{area + ': ' + name:<40}{pairs[0]:>12}{pairs[1]:>10}{pairs[2]:>12}"
                f"{'  above the target' if over else ''}"
            )
            if "--list" in sys.argv:
                for (file, function), calls in path.calls.items():
                    print(f"    {file}: {function} ({calls})")
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
