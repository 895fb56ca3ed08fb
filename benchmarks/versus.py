"""One entry's turn: publish one by one and in bulk, drain, and deliver at a steady rate, on its own Redis.

A turn whose counts do not agree (published, queued, handled, distinct, left) is invalid: it has no
figures, only what went wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import catalog
import environments
import meter
from entries.adapter import WARM
from processes import EntryProcess, RedisServer

RATE = 200
WARM_SECONDS = 0.6
"""seconds for a worker to reach its first read"""
SETTLING = 5.0
"""seconds within which what was handled must be settled"""


class Invalid(Exception):
    """The counts of a turn do not agree."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is done in one turn."""

    single: int = 1500
    """tasks published one by one"""
    scale: float = 1.0
    """times the entry's own number of tasks, for bulk publish and drain"""
    latency: int = 400
    """timed tasks at a steady rate"""


@dataclass
class Turn:
    """The result of one turn."""

    entry: str
    windows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """per workload its figures; ``foreign`` is the number of cores that other processes used"""
    versions: dict[str, str] = field(default_factory=dict)
    invalid: str | None = None


@dataclass
class Stage:
    """An entry's Redis, producer and worker."""

    redis: RedisServer
    producer: EntryProcess
    worker: EntryProcess
    versions: dict[str, str]
    patience: meter.Patience

    @property
    def pids(self) -> list[int]:
        """All of their processes."""
        return [p.process.pid for p in (self.redis, self.producer, self.worker)]

    def window(self, tasks: int, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure one workload: its own figures with those of Redis and of the machine."""
        waited = self.patience.wait(self.pids)
        foreign, redis = meter.Foreign(self.pids), meter.RedisWindow(self.redis.ask)
        figures = do()
        figures |= redis.figures(tasks)
        return {**figures, "tasks": tasks, "foreign": foreign.cores(), "waited": waited}

    def expect(self, queued: int) -> None:
        """Raise `Invalid` unless the store comes to hold as many tasks as it must."""
        deadline = time.monotonic() + SETTLING
        while (left := self.producer("left")) != queued:
            if time.monotonic() > deadline:
                raise Invalid(f"{left} tasks in the store, {queued} expected")
            time.sleep(0.02)

    def work(self, count: int) -> dict[str, Any]:
        """Let the worker handle as many tasks; raise `Invalid` unless it handled each once."""
        self.worker("work", count=count)
        return self.handled(count)

    def handled(self, count: int) -> dict[str, Any]:
        """Return the figures of the running work."""
        figures: dict[str, Any] = self.worker.answer()
        if not figures["handled"] == figures["distinct"] == count:
            raise Invalid(
                f"handled {figures['handled']}, distinct {figures['distinct']}, published {count}"
            )
        return figures


@contextmanager
def stage(
    entry: catalog.Entry, *, patience: meter.Patience, durable: bool = False
) -> Iterator[Stage]:
    """Set an entry up. Raises `NotMade` or `Failed`."""
    python, variables = environments.python_of(entry.environment)
    script = environments.ENTRIES / f"{entry.program}.py"
    with RedisServer(durable=durable) as redis, ExitStack() as opened:

        def start() -> EntryProcess:
            process = EntryProcess(python, script, entry.mode, redis.url, variables)
            return opened.enter_context(closing(process))

        producer, worker = start(), start()  # they import on both cores, then are kept on one
        versions = producer.ready()
        worker.ready()
        versions["store"] = redis.binary.name
        yield Stage(redis, producer, worker, versions, patience)


def turn(
    entry: catalog.Entry, sizes: Sizes, *, patience: meter.Patience, durable: bool = False
) -> Turn:
    """Take one turn."""
    result = Turn(entry.name)
    try:
        with stage(entry, patience=patience, durable=durable) as on:
            result.versions = on.versions
            _throughput(entry, sizes, on, result.windows)
            result.windows["latency"] = _latency(sizes.latency, on)
            on.expect(0)
    except Exception as error:  # noqa: BLE001 - the run continues, and the table reports the failure
        result.windows.clear()
        result.invalid = f"{type(error).__name__}: {error}"
    return result


def _throughput(
    entry: catalog.Entry, sizes: Sizes, on: Stage, windows: dict[str, dict[str, Any]]
) -> None:
    single, bulk = sizes.single, int(entry.tasks * sizes.scale) // 100 * 100
    everything = single + bulk
    before = meter.memory(on.redis.ask)
    windows["single"] = on.window(single, lambda: on.producer("publish_one", first=0, end=single))
    on.expect(single)
    windows["bulk"] = on.window(
        bulk, lambda: on.producer("publish_many", first=single, end=everything)
    )
    on.expect(everything)
    queued = meter.memory(on.redis.ask)
    windows["drain"] = on.window(everything, lambda: on.work(everything))
    on.expect(0)
    drained = meter.memory(on.redis.ask)
    windows["memory"] = {
        "tasks": everything,
        "queued": (queued - before) / everything,
        "drained": (drained - before) / everything,
        "foreign": 0.0,
    }


def _latency(timed: int, on: Stage) -> dict[str, Any]:
    count = timed + WARM

    def do() -> dict[str, Any]:
        on.worker("work", count=count)
        time.sleep(WARM_SECONDS)
        on.producer("publish_at", end=count, rate=RATE)
        return on.handled(count)

    return on.window(count, do)
