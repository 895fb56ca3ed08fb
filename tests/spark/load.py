"""A random load on the memory backend in virtual time, so that a minute of work takes a second or two."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from taskqueue_core.clock import ManualClock
from taskqueue_core.tasks import Delivery, Task
from taskqueue_memory import MemoryBackend, MemorySettings
from taskqueue_memory.journal import JournalLine
from taskqueue_spark.columns import TRANSITIONS

KEY = "images"


def poisson(seed: int, tasks: int, *, rate: float, mean: float) -> list[tuple[float, float]]:
    """Return arrival times and durations of tasks: a Poisson process with lognormal durations."""
    chance = random.Random(seed)
    arrivals = itertools.accumulate(chance.expovariate(rate) for _ in range(tasks))
    return [(at, mean * chance.lognormvariate(-0.2, 0.4**0.5)) for at in arrivals]


async def run(journal: Path, load: Sequence[tuple[float, float]], slots: int) -> None:
    """Publish a load, run it with a number of slots, and write every transition to the journal."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock, settings=MemorySettings(journal=journal))
    start = clock.now()
    running: list[tuple[float, int, Delivery]] = []
    numbers = itertools.count()
    settings = await backend.control.settings(KEY)
    await backend.control.configure(KEY, settings.model_copy(update={"max_inflight": slots}))
    times: dict[str, float] = {}
    async with backend.subscribe([KEY], "worker") as subscription:

        async def fill() -> None:
            for delivery in (await subscription.receive(slots, 0)).deliveries:
                end = clock.now() + times.pop(delivery.task.id)
                heapq.heappush(running, (end, next(numbers), delivery))

        async def until(moment: float) -> None:
            while running and running[0][0] <= moment:
                end, _, delivery = heapq.heappop(running)
                await clock.advance(end - clock.now())
                await subscription.ack(delivery)
                await fill()
            await clock.advance(moment - clock.now())

        for arrival, time in load:
            await until(start + arrival)
            task = Task(key=KEY)
            times[task.id] = time
            await backend.publisher.publish(task)
            await fill()
        while running:
            await until(running[0][0])
    await backend.aclose()


def transitions(journal: Path) -> pa.Table:
    """Return the lines of a journal as a table."""
    lines = msgspec.json.Decoder(JournalLine).decode_lines(journal.read_bytes())
    rows = [msgspec.structs.asdict(line) | {"shard": 0} for line in lines]
    for row in rows:
        row["ts"] = round(row["ts"] * 1e6)
        row["due_at"] = None if row["due_at"] is None else round(row["due_at"] * 1e6)
    return pa.Table.from_pylist(rows, schema=TRANSITIONS)
