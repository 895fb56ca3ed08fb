"""Measure the delay of events of running tasks: ``python benchmarks/streams.py [--highest]``.

One worker process streams, one server process stores the events in Redis and serves readers over HTTP. The delay is the
time from ``context.stream`` to the reader, which is this process. Next to it, in the same round, a bare relay: the same
events are published to channels of Redis, and a server of the same kind passes them on; it keeps and numbers nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.ports import free_port
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer
from tests.redis.serving import SOURCE, serving

_PROGRAMS = str(Path(__file__).with_name("stream_programs.py"))
_KEY = "emit"
_LEAD = 3.0
"""seconds before the first event, in which all readers connect"""
_BLOCK = 64 * 1024
"""number of bytes that a reader takes at once"""
_GOAL = 3.0
"""maximum ratio of the 99th percentile to that of the relay"""


class _Said(msgspec.Struct):
    value: Any


_said = msgspec.json.Decoder(_Said)
_EVENT = re.compile(rb"(?:id: ([^\n]*)\nevent: [^\n]*\n)?data: ([^\n]*)\n\n")
"""an event of either side: those of the relay have no id"""


class Reader:
    """Reads one stream of server-sent events, and connects again with the last id until the end."""

    def __init__(self, port: int, path: str, number: int) -> None:
        """Create a reader of ``number`` events."""
        self.port = port
        self.path = path
        self.number = number
        self.delays: list[float] = []
        self.missing = self.doubled = self.connects = 0
        self.next = 0
        self.last: str | None = None

    async def run(self) -> None:
        """Read until the last event."""
        while self.next < self.number:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._read()
            await asyncio.sleep(0.05)

    async def _read(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            self.connects += 1
            last = f"last-event-id: {self.last}\r\n" if self.last else ""
            head = f"GET {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n{last}\r\n"
            writer.write(head.encode())
            pending = b""
            while self.next < self.number and (block := await reader.read(_BLOCK)):
                pending += block
                end = 0
                for found in _EVENT.finditer(pending):
                    end = found.end()
                    self._note(found[2])
                    if found[1]:
                        self.last = found[1].decode()
                pending = pending[end:]
        finally:
            writer.close()

    def _note(self, data: bytes) -> None:
        value = _said.decode(data).value
        if not isinstance(value, list):
            return  # an event of the store
        number, at = value
        self.delays.append(time.time() - at)
        self.missing += max(0, number - self.next)
        self.doubled += number < self.next
        self.next = max(self.next, number + 1)


@asynccontextmanager
async def _program(*words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one of the programs until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, _PROGRAMS, *map(str, words)), env={**os.environ, "PYTHONPATH": SOURCE}
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _p(values: Sequence[float], share: float) -> float:
    """Return a percentile, in milliseconds."""
    return 1000 * sorted(values)[max(0, int(len(values) * share) - 1)]


class Load(msgspec.Struct, frozen=True):
    """Streams, the number of events of each, and their rate per second."""

    streams: int
    number: int
    rate: float


async def _publish_tasks(backend: RedisBackend, name: str, load: Load) -> list[str]:
    """Publish a task for each stream, whose events begin one after another."""
    streams, number, rate, start = load.streams, load.number, load.rate, time.time() + _LEAD
    ids = [f"{name}-{n}" for n in range(streams)]
    spread = 1 / rate / streams
    loads = [{"number": number, "rate": rate, "start": start + n * spread} for n in range(streams)]
    pairs = zip(ids, loads, strict=True)
    await backend.publisher.publish(*(Task.of(_KEY, load, id=each) for each, load in pairs))
    return ids


async def _ours(backend: RedisBackend, port: int, name: str, load: Load) -> list[Reader]:
    ids = await _publish_tasks(backend, name, load)
    readers = [Reader(port, f"/v1/tasks/{_KEY}/{each}/events", load.number) for each in ids]
    await asyncio.gather(*(reader.run() for reader in readers))
    return readers


async def _bare(redis: str, port: int, load: Load) -> list[Reader]:
    readers = [Reader(port, f"/s{n}", load.number) for n in range(load.streams)]
    start = time.time() + _LEAD
    async with _program("publish", redis, load.streams, load.number, load.rate, start):
        await asyncio.gather(*(reader.run() for reader in readers))
    return readers


def _shown(readers: Sequence[Reader]) -> tuple[float, float, str]:
    """Return the median and the 99th percentile, and both as text with what is missing."""
    delays = [delay for reader in readers for delay in reader.delays]
    median, high = _p(delays, 0.5), _p(delays, 0.99)
    faults = sum(reader.missing + reader.doubled for reader in readers)
    return median, high, f"{median:8.1f} {high:8.1f} {f'{faults} wrong' if faults else '':>9}"


async def _compare(rounds: int, seconds: float, rates: Sequence[tuple[int, float]]) -> None:
    """Print the delays of both sides, round by round, and the median of the ratios."""
    async with _store() as (server, folder), opened(server.url, "streams") as backend:
        relay_port = free_port()
        async with (
            serving(folder, backend="redis", redis_url=server.url, redis_prefix="streams") as own,
            _program("work", own.url, max(streams for streams, _ in rates)),
            _program("relay", server.url, relay_port),
        ):
            port = int(own.url.rpartition(":")[2])
            print(f"{'streams':>8} {'rate':>6}   {'ms p50':>8} {'p99':>8} {'':9}   relay p50, p99")
            warm = Load(20, 10, 5.0)
            await _ours(backend, port, "warm", warm)
            await _bare(server.url, relay_port, warm)
            for streams, rate in rates:
                load, ratios = Load(streams, max(2, int(seconds * rate)), rate), list[float]()
                for turn in range(rounds):
                    name = f"{streams}-{rate:g}-{turn}"
                    ours = await _ours(backend, port, name, load)
                    theirs = await _bare(server.url, relay_port, load)
                    (_, high, text), (_, other, bare) = _shown(ours), _shown(theirs)
                    ratios.append(high / other)
                    print(f"{streams:8} {rate:6g}   {text}   {bare} {high / other:6.2f} x")
                ratio = statistics.median(ratios)
                print(f"{'':16}median {ratio:.2f} x; goal: at most {_GOAL:g} x", flush=True)


async def _highest(streams: int, seconds: float) -> None:
    """Raise the rate until the delays grow, and print the highest rate that was sustained."""
    async with (
        _store() as (server, folder),
        opened(server.url, "streams") as backend,
        serving(folder, backend="redis", redis_url=server.url, redis_prefix="streams") as own,
        _program("work", own.url, streams),
    ):
        port, rate, best = int(own.url.rpartition(":")[2]), 10.0, 0.0
        await _ours(backend, port, "warm", Load(20, 10, 5.0))
        while True:
            number = int(seconds * rate)
            load = Load(streams, number, rate)
            readers = await _ours(backend, port, f"h{rate:g}", load)
            late = [delay for each in readers for delay in each.delays[-number // 4 :]]
            high = _p(late, 0.99)
            print(f"{streams} streams of {rate:g}/s: {_shown(readers)[2]}", flush=True)
            if high > 1000:
                break
            best, rate = rate, rate * 1.5
        print(f"highest sustained: {streams * best:,.0f} events per second", flush=True)


@asynccontextmanager
async def _store() -> AsyncIterator[tuple[RedisServer, Path]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        own = Path(folder) / "server"
        own.mkdir()
        yield server, own


def main() -> None:
    """Print a row for each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="Number of rounds of each rate.")
    parser.add_argument("--seconds", type=float, default=5, help="Seconds of a round.")
    parser.add_argument("--streams", type=int, default=200, help="Number of streams.")
    parser.add_argument("--highest", action="store_true", help="Measure the highest rate.")
    given = parser.parse_args()
    if given.highest:
        asyncio.run(_highest(given.streams, given.seconds))
    else:
        rates = [(given.streams, 5.0), (given.streams, 50.0)]
        asyncio.run(_compare(given.rounds, given.seconds, rates))


if __name__ == "__main__":
    main()
