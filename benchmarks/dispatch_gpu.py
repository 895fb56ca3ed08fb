"""A simulated GPU server that records the start and end of each job. Usage: ``python dispatch_gpu.py SLOTS LOW HIGH``.

Jobs take between LOW and HIGH seconds. The server prints its address as JSON. After that, for each line that it reads
from stdin, it prints the start and end of all jobs so far, in seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

from taskqueue_dispatch.gpu_server.jobs import GpuJob
from taskqueue_dispatch.gpu_server.simulator import SimulatedGpu


async def main(slots: int, low: float, high: float) -> None:
    """Run the server until stdin is closed."""
    spans: list[tuple[float, float]] = []
    chance = random.Random(1)

    async def take_time(_: GpuJob) -> Any:
        begun = time.monotonic()
        await asyncio.sleep(chance.uniform(low, high))
        spans.append((begun, time.monotonic()))
        return {"ok": True}

    async with SimulatedGpu(slots=slots, handler=take_time) as gpu:
        print(json.dumps({"url": gpu.url}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(spans), flush=True)
            spans.clear()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
