"""Measure the memory of a batch by its number of members: ``python benchmarks/fan_in.py [--members N ...]``.

Members are published in pieces, received and acked, and their records forgotten, so what remains is what the batch
itself needs. Then the batch is closed; it must end, and its callback be delivered, exactly once. The figures are the
bytes that Redis, or the memory backend, has more than before the first member, and the bytes that a waiting member
needs more than a task that is in no batch.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for parts of the tests
sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmarks.meter import memory
from taskqueue_core.after import After, TaskRef
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import control_of, dependencies_of
from taskqueue_core.consumer.carrier import carry
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from tests.redis.backends import opened
from tests.redis.engines import find_engine
from tests.redis.servers import RedisServer

_SIZES = (1_000, 10_000, 100_000, 1_000_000)
_PIECE = 1_000
_WAITING = 10_000
_LOOKS = 12
_PAYLOAD = b'{"url": "https://example.org/cat.png"}'
_WINDOW = 1.0
"""seconds for which ended members are remembered"""


async def _left(backend: Backend, used: Callable[[], int]) -> int:
    """Return the bytes in use once the records of all ended tasks are gone, and tables have become smaller again."""
    control = control_of(backend)
    await asyncio.sleep(_WINDOW)
    while (done := await control.maintain()).forgotten or done.promoted:
        pass
    looks = []
    for _ in range(_LOOKS):
        await control.maintain()
        looks.append(used())
        await asyncio.sleep(0.25)
    return min(looks)


async def _carry(backend: Backend) -> None:
    while (await carry(dependencies_of(backend)))[0]:
        pass


async def _run(backend: Backend, members: int, used: Callable[[], int]) -> str:
    """Return the figures of one batch."""
    control = control_of(backend)
    for key in ("members", "batches"):
        settings = await control.settings(key)
        await control.configure(key, settings.model_copy(update={"dedupe_window": _WINDOW}))
    batch = TaskRef("batches", "batch")
    async with backend.subscribe(["members"], "c") as consumer:

        async def drain(number: int) -> None:
            while number:
                found = (await consumer.receive(_PIECE, 10)).deliveries
                await consumer.ack(*found)
                number -= len(found)

        async def publish(number: int, into: TaskRef | None) -> None:
            for _ in range(0, number, _PIECE):
                tasks = [Task(key="members", payload=_PAYLOAD, batch=into) for _ in range(_PIECE)]
                await backend.publisher.publish(*tasks)

        waiting = []
        for into in (None, batch):
            if into is not None:
                callback = Task(key="callbacks", id="then", after=After(tasks=(batch,)))
                await backend.publisher.publish(Task(key="batches", id="batch", batch=batch))
                await backend.publisher.publish(callback)
                await _carry(backend)
            await publish(_PIECE, into)  # so that everything that exists once is there
            await drain(_PIECE)
            before = await _left(backend, used)
            await publish(_WAITING, into)
            waiting.append((used() - before) / _WAITING)
            await drain(_WAITING)
        before, start = await _left(backend, used), time.perf_counter()
        for _ in range(0, members, _PIECE):
            await publish(_PIECE, batch)
            await drain(_PIECE)
            await _carry(backend)
        seconds = time.perf_counter() - start
        more = await _left(backend, used) - before
    await dependencies_of(backend).close(batch)
    await _carry(backend)
    (status,) = await control.statuses("batches", "batch")
    assert status is not None, "the batch was forgotten"
    assert status.state is State.DONE, status
    async with backend.subscribe(["callbacks"], "c") as consumer:
        found = (await consumer.receive(10, 10)).deliveries
        assert len(found) == 1, "the callback is delivered exactly once"
        await consumer.ack(*found)
    return (
        f"{members:9,} members: {more:+9,} bytes; {waiting[1] - waiting[0]:+4.0f} bytes per waiting member "
        f"({waiting[1]:,.0f} of {waiting[0]:,.0f} without a batch); {members / seconds:,.0f} members per second"
    )


async def _on_redis(server: RedisServer, members: int) -> str:
    def ask(*words: str) -> str:
        return server.call(*words).decode()

    async with opened(server.url, f"n{members}", lease=60.0, housekeeping=60.0) as backend:
        return await _run(backend, members, lambda: memory(ask))


async def _on_memory(members: int) -> str:
    def used() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        return await _run(MemoryBackend(), members, used)
    finally:
        tracemalloc.stop()


def main() -> None:
    """Measure each size on both backends, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--members", type=int, nargs="+", default=_SIZES)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer(find_engine(), Path(folder)) as server,
    ):
        for members in options.members:
            print("Redis ", asyncio.run(_on_redis(server, members)), flush=True)
            print("memory", asyncio.run(_on_memory(members)), flush=True)


if __name__ == "__main__":
    main()
