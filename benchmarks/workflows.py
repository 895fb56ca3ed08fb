"""Measure tasks that wait for others on Redis: ``python benchmarks/workflows.py [--tasks 1000] [--rounds 7]``.

Part one runs a chain, in which each task waits for the one before and gets its result, and the same number of tasks
that wait for nothing, both with one consumer that receives a task and acks it. The ratio is the rate of the chain
divided by the rate of the others. Part two does the same with declared tasks, a `Workflow` and a local worker that runs
one task at a time, from the publish to the last end, so it includes the publishing of the steps. Both print the ratio
of the rates, and that of the processor times of this process and Redis, which other programs hardly change. Part three
publishes tasks that wait for one parent, and waiting tasks, and prints the memory that Redis needs for each.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests
sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmarks.meter import cpu_of
from taskqueue_core import Context, Queue, Tasks, chain
from taskqueue_core.after import After, TaskRef
from taskqueue_core.tasks import Task
from taskqueue_redis import RedisBackend
from taskqueue_worker import LocalWorker
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

_PAYLOAD = b'{"url": "https://example.org/cat.png"}'
_RESULT = b'"cat-320.png"'
_BLOCKED = 20_000
_Measured = tuple[float, float]
"""tasks per second, and per second of processor time"""
tasks = Tasks(prefix="chain.")
_left = 0
_ended = asyncio.Event()


@tasks.task
async def link(context: Context, previous: str = "") -> str:  # noqa: ARG001 - the parameters of a real step
    """Return a result, and say when the last task has run."""
    global _left  # noqa: PLW0603 - the handlers of this process count together
    _left -= 1
    if not _left:
        _ended.set()
    return "cat-320.png"


def tasks_of(key: str, number: int, *, chained: bool) -> list[Task]:
    """Return tasks; if ``chained``, each waits for the one before."""
    waits = [None] if number else []
    if chained:
        waits += [After(tasks=(TaskRef(key, str(n)),), inputs=(0,)) for n in range(number - 1)]
    else:
        waits *= number
    return [Task(key=key, id=str(n), payload=_PAYLOAD, after=waits[n]) for n in range(number)]


class Clock:
    """The time and the processor time that pass from its creation on."""

    def __init__(self, server: RedisServer) -> None:
        self._pid = server.pid
        self._start, self._cpu = time.perf_counter(), self._used()

    def _used(self) -> float:
        return time.process_time() + cpu_of(self._pid)

    def rates(self, number: int) -> _Measured:
        """Return the rates of this number of tasks."""
        return number / (time.perf_counter() - self._start), number / (self._used() - self._cpu)


async def run_singly(
    server: RedisServer, backend: RedisBackend, key: str, number: int, *, chained: bool
) -> _Measured:
    """Publish tasks and run them one after another; return their rates."""
    async with backend.subscribe([key], "c") as consumer:
        await consumer.receive(1, 0)
        await backend.publisher.publish(*tasks_of(key, number, chained=chained))
        clock, done = Clock(server), 0
        while done < number:
            for delivery in (await consumer.receive(1, None)).deliveries:
                await consumer.ack(delivery, results=[_RESULT])
                done += 1
        return clock.rates(number)


async def run_declared(server: RedisServer, number: int, *, chained: bool) -> _Measured:
    """Publish a workflow, or single tasks, and return their rates, from the publish on."""
    global _left  # noqa: PLW0603 - the handlers of this process count together
    _left = number
    _ended.clear()
    clock = Clock(server)
    if chained:
        await chain(*[link.call() for _ in range(number)]).publish()
    else:
        await tasks.publish_many(link.call() for _ in range(number))
    await _ended.wait()
    return clock.rates(number)


async def workflows(server: RedisServer, number: int, rounds: int) -> None:
    """Print the rates of a chain that is published as a workflow, and of single tasks."""
    rates: dict[bool, list[_Measured]] = {False: [], True: []}
    async with AsyncExitStack() as stack:
        backend = await stack.enter_async_context(opened(server.url, "flow", lease=60.0))
        await stack.enter_async_context(tasks.connect(Queue(backend)))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        worker = LocalWorker(tasks, backend=backend, concurrency=1)
        group.create_task(worker.serve())
        for turn in range(rounds):
            for chained in (False, True) if turn % 2 else (True, False):
                rates[chained].append(await run_declared(server, number, chained=chained))
        worker.stop()
    _print(number, rates, "a workflow with a chain")


def _print(number: int, rates: dict[bool, list[_Measured]], name: str) -> None:
    for which, unit in enumerate(("second", "second of processor time")):
        single, chained = ([one[which] for one in rates[each]] for each in (False, True))
        ratios = [one / other for one, other in zip(chained, single, strict=True)]
        print(
            f"{number} single tasks: {statistics.median(single):,.0f} per {unit}; {name}: "
            f"{statistics.median(chained):,.0f}; ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); the goal is 0.4"
        )


async def chains(server: RedisServer, number: int, rounds: int) -> None:
    """Print the rates of a chain and of tasks that wait for nothing."""
    rates: dict[bool, list[_Measured]] = {False: [], True: []}
    async with opened(server.url, "chain", lease=60.0, housekeeping=60.0) as backend:
        for turn in range(rounds):
            for chained in (False, True) if turn % 2 else (True, False):
                key = f"{turn}-{chained}"
                rate = await run_singly(server, backend, key, number, chained=chained)
                rates[chained].append(rate)
    _print(number, rates, "a chain")


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
        await workflows(server, options.tasks, options.rounds)
        await memory(server)


if __name__ == "__main__":
    asyncio.run(main())
