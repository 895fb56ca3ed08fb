"""The code that all entries of the benchmark share: commands, counts and access to Redis.

It imports only the standard library, so that it runs in the environment of any other library, without the packages of
this project. An entry is a program that is started with a mode and a Redis URL. It reads one command per line, as a
JSON object, and answers with one JSON object per line. `serve` is its main loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from statistics import median, quantiles
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

SIZE = 200
"""size of a task's payload as JSON, in bytes"""
BATCH = 100
"""number of tasks in a batch, for entries that publish or receive in batches"""
WARM = 60
"""number of tasks at the beginning of a latency measurement that are handled but not timed"""
_NEVER = 1 << 60
_NOTE = "x" * (SIZE - len('{"number":,"sent":,"note":""}'))


def payload(number: int, sent: float = 0.0) -> dict[str, Any]:
    """Return the payload of a task: `SIZE` bytes as compact JSON."""
    return {
        "number": number,
        "sent": sent,
        "note": _NOTE[len(str(number)) + len(repr(sent)) :],
    }


def batches(numbers: range, size: int = BATCH) -> Iterator[range]:
    """Split a range into ranges of ``size`` numbers; the last one may be shorter."""
    for at in range(0, len(numbers), size):
        yield numbers[at : at + size]


class Book:
    """A thread-safe count of handled tasks, which reports when the expected number is reached."""

    current: ClassVar[Book]
    """the instance that is in use, for handlers that are plain functions"""

    def __init__(self, expected: int = _NEVER) -> None:
        self.expected = expected
        self.numbers: list[int] = []
        self.ages: list[float] = []
        self.began = self.ended = 0.0
        self._cpu = [0.0, 0.0]
        self._full: Callable[[], object] | None = None

    def note(self, number: int, sent: float = 0.0) -> None:
        """Count one handled task. ``sent`` is the time at which its publisher started to publish it."""
        if not self.numbers and not self.began:
            self.begin()
        self.numbers.append(number)  # atomic, so threads may call this
        if sent:
            self.ages.append(time.monotonic() - sent)
        if len(self.numbers) == self.expected:
            self.end()
            if self._full is not None:
                self._full()

    def begin(self) -> None:
        """Start the clock. If this is not called, the first handled task starts it."""
        self.began, self._cpu[0] = time.monotonic(), time.process_time()

    def end(self) -> None:
        """Stop the clock. The last handled task stops it as well; if this is called later, the later time counts."""
        self.ended, self._cpu[1] = time.monotonic(), time.process_time()

    def when_full(self, call: Callable[[], object]) -> None:
        """Register a function that is called when all tasks are handled, in the thread that handled the last task."""
        self._full = call

    def waiter(self) -> asyncio.Event:
        """Return an event of the running loop that is set when all tasks are handled, or by `stop`."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self.when_full(lambda: loop.call_soon_threadsafe(event.set))
        return event

    def stop(self) -> None:
        """End the measurement although not all tasks are handled."""
        if self._full is not None:
            self._full()

    def figures(self) -> dict[str, Any]:
        """Return the counts, the elapsed time, the CPU time, and the ages of tasks that contain their publish time."""
        figures: dict[str, Any] = {
            "handled": len(self.numbers),
            "distinct": len(set(self.numbers)),
            "seconds": self.ended - self.began,
            "cpu": self._cpu[1] - self._cpu[0],
        }
        ages = self.ages[WARM:]
        if len(ages) > 1:
            cuts = quantiles(ages, n=100)
            figures |= {"p50": median(ages), "p99": cuts[98], "samples": len(ages)}
        return figures


async def handle(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - part of the payload
    """Handle one task in a coroutine."""
    Book.current.note(number, sent)


def handle_in_thread(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - part of the payload
    """Handle one task, in a thread."""
    Book.current.note(number, sent)


class Entry(Protocol):
    """One system under measurement. Its methods may be plain or coroutines; the latter share one event loop.

    It may also have a method ``open``, which is called first, and a method ``close``, which is called last.
    """

    @property
    def packages(self) -> Sequence[str]:
        """Return the names of the distributions whose versions are written into the result."""
        ...

    def publish(self, number: int, sent: float) -> Any:
        """Publish one task, and return when the store has confirmed it."""
        ...

    def publish_many(self, numbers: range) -> Any:
        """Publish tasks with the fastest bulk call of the library's public API."""
        ...

    def work(self, book: Book) -> Any:
        """Handle and settle tasks, and count each in ``book``, until all tasks are counted or ``book`` is stopped."""
        ...

    def left(self) -> Any:
        """Return the number of tasks in the store that are not settled yet."""
        ...


async def until_settled(entry: Entry, full: asyncio.Event) -> None:
    """Wait until all tasks are handled and settled in the store, so that stopping the worker loses no ack."""
    await full.wait()
    while entry.left():  # noqa: ASYNC110 - the store sends no notification
        await asyncio.sleep(0.01)


async def run_until_settled(entry: Entry, book: Book, worker: Coroutine[Any, Any, Any]) -> None:
    """Run a worker in this event loop, and cancel it when all tasks are settled."""
    full = book.waiter()
    running = asyncio.create_task(worker)
    await until_settled(entry, full)
    running.cancel()
    await asyncio.wait({running})


class Threads(Protocol):
    """A worker whose threads are started and stopped."""

    def start(self) -> object:
        """Start the threads."""
        ...

    def stop(self) -> object:
        """Stop the threads."""
        ...


def run_threads_until_settled(entry: Entry, book: Book, worker: Threads) -> None:
    """Run a worker that uses threads, and stop it when all tasks are settled."""
    full = threading.Event()
    book.when_full(full.set)
    worker.start()
    full.wait()
    while entry.left():
        time.sleep(0.01)
    worker.stop()


def serve(make: Callable[[str, str], Entry], loop: Callable[[], Any] | None = None) -> None:
    """Create an entry from the mode and the URL on the command line, and execute commands until stdin is closed."""
    logging.disable(logging.WARNING)  # of every entry alike
    with asyncio.Runner(loop_factory=loop) as runner:

        def finish(value: Any) -> Any:
            return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

        entry = make(sys.argv[1], sys.argv[2])
        finish(_if_there(entry, "open"))
        _answer({"ready": _versions(entry.packages)})
        for line in sys.stdin:
            command = json.loads(line)
            try:
                _answer(finish(_obey(entry, command)))
            except Exception as error:  # noqa: BLE001 - any error must be reported to the runner
                _answer({"error": f"{type(error).__name__}: {error}"})
        finish(_if_there(entry, "close"))


def _if_there(entry: Entry, name: str) -> Any:
    method = getattr(entry, name, None)
    return method() if method is not None else None


def _obey(entry: Entry, command: dict[str, Any]) -> Any:
    word = command.pop("do")
    if word == "publish_one":
        return _timed(lambda: _each(entry, range(command["first"], command["end"])))
    if word == "publish_many":
        return _timed(lambda: entry.publish_many(range(command["first"], command["end"])))
    if word == "publish_at":
        return _timed(lambda: _paced(entry, range(command["end"]), command["rate"]))
    if word == "work":
        return _work(entry, Book(command["count"]))
    if word == "idle":
        book = Book()
        threading.Timer(command["seconds"], book.stop).start()
        return _work(entry, book)
    if word == "idle_many":
        _answer({"working": True})
    return getattr(entry, word)(**command)  # what only some entries can do


def _each(entry: Entry, numbers: Iterable[int]) -> Any:
    if not inspect.iscoroutinefunction(entry.publish):
        for number in numbers:
            entry.publish(number, 0.0)
        return None

    async def every() -> None:
        for number in numbers:
            await entry.publish(number, 0.0)

    return every()


def _paced(entry: Entry, numbers: range, rate: float) -> Any:
    start = time.monotonic()
    if not inspect.iscoroutinefunction(entry.publish):
        for number in numbers:
            time.sleep(max(0.0, start + number / rate - time.monotonic()))
            entry.publish(number, time.monotonic())
        return None

    async def every() -> None:
        for number in numbers:
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            await entry.publish(number, time.monotonic())

    return every()


def _timed(call: Callable[[], Any]) -> Any:
    start, cpu = time.monotonic(), time.process_time()

    def figures(_: object = None) -> dict[str, float]:
        return {"seconds": time.monotonic() - start, "cpu": time.process_time() - cpu}

    value = call()
    return _then(value, figures) if inspect.isawaitable(value) else figures()


def _work(entry: Entry, book: Book) -> Any:
    _answer({"working": True})
    Book.current = book
    value = entry.work(book)
    if inspect.isawaitable(value):
        return _then(value, lambda _: book.figures())
    return book.figures()


async def _then(value: Awaitable[Any], then: Callable[[Any], Any]) -> Any:
    return then(await value)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _answer(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


class RedisError(Exception):
    """The error that Redis returned for a command."""


class PlainRedis:
    """A blocking connection to Redis, for counting and checking entries. It sends one command at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port or 6379), timeout=30)
        self._file = self._socket.makefile("rb")

    def __call__(self, *words: str | int) -> Any:
        """Run a command and return its response, with bulk strings decoded to text."""
        encoded = [str(word).encode() for word in words]
        parts = [b"*%d\r\n" % len(encoded)]
        parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded]
        self._socket.sendall(b"".join(parts))
        return self._read()

    def _read(self) -> Any:
        line = self._file.readline()
        if not line:
            raise ConnectionResetError("Redis closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RedisError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            if rest == b"-1":
                return None
            text = self._file.read(int(rest) + 2)[:-2]
            return text.decode(errors="replace")
        if kind == b"*":
            return None if rest == b"-1" else [self._read() for _ in range(int(rest))]
        return rest.decode()

    def make_group(self, stream: str, group: str) -> None:
        """Create a consumer group that starts at the beginning of a stream, unless it exists."""
        if not self("EXISTS", stream) or not self("XINFO", "GROUPS", stream):
            self("XGROUP", "CREATE", stream, group, "0", "MKSTREAM")

    def group_left(self, stream: str, group: str) -> int:
        """Return the number of entries of a stream that a consumer group has not read or not acknowledged."""
        try:
            for row in self("XINFO", "GROUPS", stream):
                about = dict(zip(row[::2], row[1::2], strict=True))
                if about["name"] == group:
                    return int(about["pending"]) + int(about["lag"] or 0)
        except RedisError:
            return 0  # the stream does not exist
        return int(self("XLEN", stream))

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()
