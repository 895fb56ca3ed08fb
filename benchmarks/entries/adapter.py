"""What every entry of the benchmark shares: the commands it obeys, what it counts, and how it reads Redis.

It needs the standard library only, so that it runs in any peer's environment and brings nothing of
ours into it. An entry is a program: it is started with its mode and a Redis URL, reads one JSON
object per line and answers each with one. `serve` is its main loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from statistics import median, quantiles
from typing import Any, Protocol
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


class Book:
    """Counts what is handled, from any thread, and says when it is enough."""

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


class Entry(Protocol):
    """One system under measurement. Its methods may be plain or coroutines; the latter share one event loop."""

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
        """Return how many tasks the store still has to hand out or to have settled."""
        ...


async def until_settled(entry: Entry) -> None:
    """Wait until the store says that all is acknowledged, so that stopping a worker cuts nothing off."""
    while entry.left():  # noqa: ASYNC110 - the store rings no bell
        await asyncio.sleep(0.01)


def serve(
    make: Callable[[str, str], Entry | Awaitable[Entry]], loop: Callable[[], Any] | None = None
) -> None:
    """Make an entry from the command line's mode and URL, obey commands until standard input ends."""
    with asyncio.Runner(loop_factory=loop) as runner:

        def finish(value: Any) -> Any:
            return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

        entry = finish(make(sys.argv[1], sys.argv[2]))
        _answer({"ready": _versions(entry.packages)})
        for line in sys.stdin:
            command = json.loads(line)
            try:
                _answer(finish(_obey(entry, command)))
            except Exception as error:  # noqa: BLE001 - whatever it is, the runner must hear of it
                _answer({"error": f"{type(error).__name__}: {error}"})
        with suppress(AttributeError):
            finish(entry.close())


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
