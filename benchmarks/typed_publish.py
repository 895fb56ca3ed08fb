"""The processor time of a typed publish, compared with `Queue.publish`, on the memory backend.

Usage: ``.venv/3.13/bin/python -m benchmarks.typed_publish``. Each round measures both, one after the other; the
smallest time of each counts, because other work of the machine only adds to it.
"""

from __future__ import annotations

import asyncio
import gc
import time

from taskqueue_core import Queue, Tasks
from taskqueue_memory import MemoryBackend

_ROUNDS, _TASKS = 20, 3000
tasks = Tasks()


@tasks.task
def resize(image: str, width: int = 320) -> dict[str, str | int]:
    """Return both arguments."""
    return {"image": image, "width": width}


async def _untyped(queue: Queue) -> float:
    began = time.process_time()
    for _ in range(_TASKS):
        await queue.publish("resize", {"image": "cat.png", "width": 320})
    return time.process_time() - began


async def _typed(queue: Queue) -> float:
    async with tasks.connect(queue):
        began = time.process_time()
        for _ in range(_TASKS):
            await resize.publish("cat.png", width=320)
        return time.process_time() - began


async def main() -> None:
    """Measure, and print microseconds per publish and their ratio."""
    untyped, typed = [], []
    for _ in range(_ROUNDS):
        gc.collect()  # what the other measurement has left
        untyped.append(await _untyped(Queue(MemoryBackend())))
        gc.collect()
        typed.append(await _typed(Queue(MemoryBackend())))
    plain, declared = (min(each) / _TASKS * 1e6 for each in (untyped, typed))
    print(f"Queue.publish {plain:.1f} µs, typed {declared:.1f} µs: ratio {declared / plain:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
