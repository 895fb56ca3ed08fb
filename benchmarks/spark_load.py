"""Random loads, which are executed on a backend in real time or in virtual time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from taskqueue_core import Delivery, Task
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of
from taskqueue_core.clock import ManualClock
from taskqueue_memory import MemoryBackend, MemorySettings

Load = Sequence[tuple[float, float]]
"""for each task, the time of its publishing and its duration, in seconds"""
_SPREAD = math.log(1.5)
"""variance of the logarithm of the times: their squared coefficient of variation is 0.5"""


def poisson(seed: int, tasks: int, *, rate: float, mean: float) -> Load:
    """Return a load whose arrivals are a Poisson process, with durations from a lognormal distribution."""
    chance = random.Random(seed)
    arrivals = itertools.accumulate(chance.expovariate(rate) for _ in range(tasks))
    spread = math.sqrt(_SPREAD)
    return [(at, mean * chance.lognormvariate(-_SPREAD / 2, spread)) for at in arrivals]


async def configure(backend: Backend, key: str, slots: int) -> None:
    """Limit the number of tasks in flight to ``slots``, and turn the journal on."""
    control = control_of(backend)
    kept = await control.settings(key)
    changed = {"max_inflight": slots, "journal": True}
    await control.configure(key, kept.model_copy(update=changed))


async def play(backend: Backend, loads: Mapping[str, Load], slots: Mapping[str, int]) -> None:
    """Publish each task of the loads at its time, and execute the tasks of each key in its number of slots."""
    times: dict[str, float] = {}
    done = asyncio.Semaphore(0)
    for key, number in slots.items():
        await configure(backend, key, number)
    workers = [asyncio.create_task(_work(backend, key, times, done)) for key in loads]
    async with asyncio.TaskGroup() as group:
        for key, load in loads.items():
            group.create_task(_publish(backend, key, load, times))
    for _ in range(sum(map(len, loads.values()))):
        await done.acquire()
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def _publish(backend: Backend, key: str, load: Load, times: dict[str, float]) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    for arrival, time in load:
        if (early := start + arrival - loop.time()) > 0:
            await asyncio.sleep(early)
        task = Task(key=key)
        times[task.id] = time
        await backend.publisher.publish(task)


async def _work(
    backend: Backend, key: str, times: dict[str, float], done: asyncio.Semaphore
) -> None:
    async with (
        backend.subscribe([key], f"worker-{key}") as subscription,
        asyncio.TaskGroup() as group,
    ):

        async def run(delivery: Delivery) -> None:
            await asyncio.sleep(times.pop(delivery.task.id))
            await subscription.ack(delivery)
            done.release()

        while True:
            for delivery in (await subscription.receive(100, None)).deliveries:
                group.create_task(run(delivery))


async def simulate(journal: Path, key: str, load: Load, slots: int) -> None:
    """Execute a load as `play` does, but on the memory backend and in virtual time."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock, settings=MemorySettings(journal=journal))
    await configure(backend, key, slots)
    start, numbers = clock.now(), itertools.count()
    running: list[tuple[float, int, Delivery]] = []
    times: dict[str, float] = {}
    async with backend.subscribe([key], f"worker-{key}") as subscription:

        async def fill() -> None:
            for delivery in (await subscription.receive(100, 0)).deliveries:
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
            task = Task(key=key)
            times[task.id] = time
            await backend.publisher.publish(task)
            await fill()
        while running:
            await until(running[0][0])
    await backend.aclose()
