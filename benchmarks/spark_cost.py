"""The cost of a journal: the same tasks are published and drained in turn with and without a journal."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import processes
from entries.adapter import PlainRedis, payload
from spark_sizes import Sizes

from taskqueue_core import Task
from taskqueue_redis import RedisBackend, RedisSettings

_TURNS = 5
_BATCH = 100


def measure(sizes: Sizes, turn: int) -> dict[str, list[float]]:
    """Return throughputs, Redis's time per task, and the loss of throughput caused by the journal."""
    del turn
    with processes.RedisServer() as redis:
        processes.pin(os.getpid(), 1)
        return asyncio.run(_measure(redis, sizes.cost))


async def _measure(redis: processes.RedisServer, tasks: int) -> dict[str, list[float]]:
    settings = RedisSettings(url=redis.url, prefix="cost", _env_file=None)  # type: ignore[arg-type,call-arg]
    backend = RedisBackend(settings=settings)
    spent: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
    try:
        for journal in (False, True):
            key = _key(journal)
            kept = await backend.control.settings(key)
            changed = {"journal": journal, "dedupe_window": 1.0}
            await backend.control.configure(key, kept.model_copy(update=changed))
            await _round(backend, key, tasks // 10)
        for _ in range(_TURNS):
            for journal in (False, True):
                cpu, own, start = _cpu(redis.ask), time.process_time(), time.perf_counter()
                await _round(backend, _key(journal), tasks)
                lasted = time.perf_counter() - start
                own, cpu = time.process_time() - own, _cpu(redis.ask) - cpu
                spent[journal].append((lasted / tasks, cpu / tasks, (own + cpu) / tasks))
                await backend.control.maintain()
    finally:
        await backend.aclose()
    off, on = zip(*spent[False], strict=True), zip(*spent[True], strict=True)
    (wall, cpu, both), (wall_on, cpu_on, both_on) = off, on
    return {
        "publish and drain without journal, tasks/s": [1 / one for one in wall],
        "publish and drain with journal, tasks/s": [1 / one for one in wall_on],
        "Redis's time per task without journal, µs": [1e6 * one for one in cpu],
        "Redis's time per task with journal, µs": [1e6 * one for one in cpu_on],
        "share of the throughput that the journal takes": _shares(wall, wall_on),
        "share of the CPU time that the journal takes": _shares(both, both_on),
    }


def _shares(without: Sequence[float], having: Sequence[float]) -> list[float]:
    return [1 - one / other for one, other in zip(without, having, strict=True)]


async def _round(backend: RedisBackend, key: str, tasks: int) -> None:
    work = [Task.of(key, payload(number)) for number in range(tasks)]
    for first in range(0, tasks, _BATCH):
        await backend.publisher.publish(*work[first : first + _BATCH])
    handled = 0
    async with backend.subscribe([key], "bench") as subscription:
        while handled < tasks:
            received = await subscription.receive(_BATCH, 5.0)
            assert received.deliveries, f"{handled} of {tasks} handled"
            await subscription.ack(*received.deliveries)
            handled += len(received.deliveries)


def _key(journal: bool) -> str:  # noqa: FBT001 - it is what the key is named for
    return "journaled" if journal else "plain"


def _cpu(ask: PlainRedis) -> float:
    about = dict(line.partition(":")[::2] for line in ask("INFO", "cpu").splitlines())
    return float(about["used_cpu_user"]) + float(about["used_cpu_sys"])
