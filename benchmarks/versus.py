"""One turn of one entry: publish single tasks and in bulk, drain, and deliver at a steady rate, on a new Redis server.

If the counts of a turn do not agree (published, queued, handled, distinct, left), the turn is invalid: it has no
figures, only an error.
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
"""seconds that a worker has to start reading"""
SETTLING = 5.0
"""seconds within which handled tasks must be settled"""


class Invalid(Exception):
    """The counts of a turn do not agree."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers of tasks in one turn."""

    single: int = 1500
    """tasks published one by one"""
    scale: float = 1.0
    """factor for the entry's number of tasks in bulk publish and drain"""
    latency: int = 400
    """number of timed tasks that are published at a steady rate"""


@dataclass
class Turn:
    """The result of one turn."""

    entry: str
    windows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """the figures of each workload; ``foreign`` is the number of cores that other processes used"""
    versions: dict[str, str] = field(default_factory=dict)
    invalid: str | None = None


@dataclass
class Stage:
    """The Redis server, the producer and the worker of an entry."""

    redis: RedisServer
    producer: EntryProcess
    worker: EntryProcess
    versions: dict[str, str]
    patience: meter.Patience

    @property
    def pids(self) -> list[int]:
        """The process ids of the Redis server, the producer and the worker."""
        return [p.process.pid for p in (self.redis, self.producer, self.worker)]

    def window(self, tasks: int, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Measure one workload: return its figures together with those of Redis and of the machine."""
        waited = self.patience.wait(self.pids)
        foreign, redis = meter.Foreign(self.pids), meter.RedisWindow(self.redis.ask)
        figures = do()
        figures |= redis.figures(tasks)
        return {**figures, "tasks": tasks, "foreign": foreign.cores(), "waited": waited}

    def expect(self, queued: int) -> None:
        """Wait until the store contains ``queued`` tasks; raise `Invalid` if it does not."""
        deadline = time.monotonic() + SETTLING
        while (left := self.producer("left")) != queued:
            if time.monotonic() > deadline:
                raise Invalid(f"{left} tasks in the store, {queued} expected")
            time.sleep(0.02)

    def work(self, count: int) -> dict[str, Any]:
        """Let the worker handle ``count`` tasks; raise `Invalid` if it did not handle each task once."""
        self.worker("work", count=count)
        return self.handled(count)

    def handled(self, count: int) -> dict[str, Any]:
        """Wait for the running worker and return its figures."""
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
    """Start the processes of an entry, and end them when the context ends. Raises `NotMade` or `Failed`."""
    python, variables = environments.python_of(entry.environment)
    script = environments.ENTRIES / f"{entry.program}.py"
    with RedisServer(durable=durable) as redis, ExitStack() as opened:

        def start() -> EntryProcess:
            process = EntryProcess(python, script, entry.mode, redis.url, variables)
            return opened.enter_context(closing(process))

        producer, worker = start(), start()  # pinned to a core after their imports
        versions = producer.ready()
        worker.ready()
        versions["store"] = redis.binary.name
        yield Stage(redis, producer, worker, versions, patience)


def turn(
    entry: catalog.Entry, sizes: Sizes, *, patience: meter.Patience, durable: bool = False
) -> Turn:
    """Measure all workloads of one entry."""
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
