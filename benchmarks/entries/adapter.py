"""The code that all entries of the benchmark share: commands, counts and access to Redis.

It needs the standard library only, so that it runs in any peer's environment without any package of
ours. An entry is a program: it is started with its mode and a Redis URL, reads one JSON
object per line and answers each with one. `serve` is its main loop.
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
"""bytes of one task's payload as JSON"""
BATCH = 100
"""tasks of one batch, wherever an entry works in batches"""
WARM = 60
"""first tasks of a latency measurement that are handled but not timed"""
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
    """Yield the numbers in runs of ``size``; the last may be shorter."""
    for at in range(0, len(numbers), size):
        yield numbers[at : at + size]


class Book:
    """Counts what is handled, from any thread, and says when it is enough."""

    current: ClassVar[Book]
    """the book of the running work, for handlers that are plain functions"""

    def __init__(self, expected: int = _NEVER) -> None:
        self.expected = expected
        self.numbers: list[int] = []
        self.ages: list[float] = []
        self.began = self.ended = 0.0
        self._cpu = [0.0, 0.0]
        self._full: Callable[[], object] | None = None

    def note(self, number: int, sent: float = 0.0) -> None:
        """Count one handled task; ``sent`` is when its publisher started to publish it."""
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
        """Start the clock; without a call, the first handled task does."""
        self.began, self._cpu[0] = time.monotonic(), time.process_time()

    def end(self) -> None:
        """Stop the clock; the last handled task does so too, a later call overrules it."""
        self.ended, self._cpu[1] = time.monotonic(), time.process_time()

    def when_full(self, call: Callable[[], object]) -> None:
        """Let ``call`` be called once all is handled, in the thread that handled the last one."""
        self._full = call

    def waiter(self) -> asyncio.Event:
        """Return an event of the running loop that is set once all is handled, or by `stop`."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self.when_full(lambda: loop.call_soon_threadsafe(event.set))
        return event

    def stop(self) -> None:
        """End the work although not all is handled."""
        if self._full is not None:
            self._full()

    def figures(self) -> dict[str, Any]:
        """Return the counts, the time and the CPU, and the ages where tasks carried their time."""
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


async def handle(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task, on an event loop."""
    Book.current.note(number, sent)


def handle_in_thread(number: int, sent: float, note: str) -> None:  # noqa: ARG001 - a task's payload
    """Handle one task, in a thread."""
    Book.current.note(number, sent)


class Entry(Protocol):
    """One system under measurement. Its methods may be plain or coroutines; the latter share one event loop.

    It may also have ``open``, called before everything else, and ``close``, called at the end.
    """

    @property
    def packages(self) -> Sequence[str]:
        """Return the distributions whose versions belong to the result."""
        ...

    def publish(self, number: int, sent: float) -> Any:
        """Publish one task and return once the store has confirmed it."""
        ...

    def publish_many(self, numbers: range) -> Any:
        """Publish tasks by the best bulk call that the public interface has."""
        ...

    def work(self, book: Book) -> Any:
        """Handle tasks, noting each in the book, until it is full or stopped; settle them; return once stopped."""
        ...

    def left(self) -> Any:
        """Return the number of tasks in the store that are not delivered or not settled yet."""
        ...


async def until_settled(entry: Entry, full: asyncio.Event) -> None:
    """Wait until all is handled and the store says that it is settled, so that stopping a worker cuts nothing off."""
    await full.wait()
    while entry.left():  # noqa: ASYNC110 - the store sends no notification
        await asyncio.sleep(0.01)


async def run_until_settled(entry: Entry, book: Book, worker: Coroutine[Any, Any, Any]) -> None:
    """Run a worker on this event loop, and cancel it once all is settled."""
    full = book.waiter()
    running = asyncio.create_task(worker)
    await until_settled(entry, full)
    running.cancel()
    await asyncio.wait({running})


class Threads(Protocol):
    """A worker whose threads are started and stopped."""

    def start(self) -> object:
        """Start them."""
        ...

    def stop(self) -> object:
        """Stop them."""
        ...


def run_threads_until_settled(entry: Entry, book: Book, worker: Threads) -> None:
    """Run a worker of threads, and stop it once all is settled."""
    full = threading.Event()
    book.when_full(full.set)
    worker.start()
    full.wait()
    while entry.left():
        time.sleep(0.01)
    worker.stop()


def serve(make: Callable[[str, str], Entry], loop: Callable[[], Any] | None = None) -> None:
    """Make an entry from the command line's mode and URL, obey commands until standard input ends."""
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
    """Redis answered with an error."""


class PlainRedis:
    """A blocking connection to Redis for counting and checking: one command, one answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port or 6379), timeout=30)
        self._file = self._socket.makefile("rb")

    def __call__(self, *words: str | int) -> Any:
        """Run a command; bulk strings come back as text."""
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
        """Make a stream's group, at the stream's beginning, unless the stream has one."""
        if not self("EXISTS", stream) or not self("XINFO", "GROUPS", stream):
            self("XGROUP", "CREATE", stream, group, "0", "MKSTREAM")

    def group_left(self, stream: str, group: str) -> int:
        """Return how many entries a stream's group has not read, or has read and not acknowledged."""
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
