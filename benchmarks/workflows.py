"""Measure tasks that wait for others on Redis: ``python benchmarks/workflows.py [--tasks 1000] [--rounds 7]``.

Part one runs a chain, in which each task waits for the one before and gets its result, and the same number of tasks
that wait for nothing, both with one consumer that receives a task and acks it. The ratio is the rate of the chain
divided by the rate of the others. Part two publishes tasks that wait for one parent, and waiting tasks, and prints the
memory that Redis needs for each.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests

from taskqueue_core.after import After, TaskRef
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

_PAYLOAD = b'{"url": "https://example.org/cat.png"}'
_RESULT = b'"cat-320.png"'
_BLOCKED = 20_000


def tasks_of(key: str, number: int, *, chained: bool) -> list[Task]:
    """Return tasks; if ``chained``, each waits for the one before."""
    waits = [None] if number else []
    if chained:
        waits += [After(tasks=(TaskRef(key, str(n)),), inputs=(0,)) for n in range(number - 1)]
    else:
        waits *= number
    return [Task(key=key, id=str(n), payload=_PAYLOAD, after=waits[n]) for n in range(number)]


async def run_singly(backend: RedisBackend, key: str, number: int, *, chained: bool) -> float:
    """Publish tasks and run them one after another; return how many are run per second."""
    async with backend.subscribe([key], "c") as consumer:
        await consumer.receive(1, 0)
        await backend.publisher.publish(*tasks_of(key, number, chained=chained))
        start, done = time.perf_counter(), 0
        while done < number:
            for delivery in (await consumer.receive(1, None)).deliveries:
                await consumer.ack(delivery, results=[_RESULT])
                done += 1
        return number / (time.perf_counter() - start)


async def chains(server: RedisServer, number: int, rounds: int) -> None:
    """Print the rates of a chain and of tasks that wait for nothing."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    async with opened(server.url, "chain", lease=60.0, housekeeping=60.0) as backend:
        for turn in range(rounds):
            for chained in (False, True) if turn % 2 else (True, False):
                rate = await run_singly(backend, f"{turn}-{chained}", number, chained=chained)
                rates[chained].append(rate)
    ratios = [chain / other for chain, other in zip(rates[True], rates[False], strict=True)]
    print(
        f"{number} tasks that wait for nothing: {statistics.median(rates[False]):,.0f} per second"
    )
    print(f"a chain of {number}: {statistics.median(rates[True]):,.0f} per second")
    print(f"ratio: {statistics.median(ratios):.2f} (lowest {min(ratios):.2f}); the goal is 0.4")


async def memory(server: RedisServer) -> None:
    """Print the memory in Redis per blocked and per waiting task."""

    def used() -> int:
        lines = server.call("INFO", "memory").decode().splitlines()
        return int(next(line.split(":")[1] for line in lines if line.startswith("used_memory:")))

    async with opened(server.url, "memory", lease=60.0, housekeeping=60.0) as backend:
        await backend.publisher.publish(Task(key="parents", id="parent"))
        for key, after in (
            ("waiting", None),
            ("blocked", After(tasks=(TaskRef("parents", "parent"),))),
        ):
            before = used()
            tasks = [Task(key=key, payload=_PAYLOAD, after=after) for _ in range(_BLOCKED)]
            for start in range(0, _BLOCKED, 1000):
                await backend.publisher.publish(*tasks[start : start + 1000])
            print(f"memory per {key} task: {(used() - before) / _BLOCKED:,.0f} bytes")


async def main() -> None:
    """Run the measurements on a server of their own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=1000, help="Number of tasks in a chain.")
    parser.add_argument("--rounds", type=int, default=7, help="Number of rounds.")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        await chains(server, options.tasks, options.rounds)
        await memory(server)


if __name__ == "__main__":
    asyncio.run(main())
