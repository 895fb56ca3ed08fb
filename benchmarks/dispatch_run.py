"""One measurement of the dispatcher with a backlog of jobs. Usage: ``python dispatch_run.py HOW URL SLOTS JOBS``.

HOW is ``memory``, a Redis URL, or ``bare``. With ``bare``, one loop per slot sends one job after another with the same
HTTP client, without a dispatcher. Prints as JSON the number of jobs done, the times from the end of a job to the next
POST on the same slot, and the start and end of each POST.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

from taskqueue_core.capabilities import Permit, SlotLease, control_of
from taskqueue_core.tasks import Task
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.endpoint_client.client import EndpointClient
from taskqueue_dispatch.jobs import Submission
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.service import Dispatcher
from taskqueue_memory import MemoryBackend
from taskqueue_redis import RedisBackend
from taskqueue_redis.config import RedisSettings

MODEL = "bench"
PAYLOAD = b'{"prompt":"a sunset over the sea"}'


class Watched(EndpointClient):
    """A client that records when each POST starts and is answered, and the time from a slot's end to the next POST."""

    def __init__(self, settings: DispatchSettings) -> None:
        """Create a client that has recorded nothing yet."""
        super().__init__(settings)
        self.gaps: list[float] = []
        self.spans: list[tuple[float, float]] = []
        self._ends: deque[float] = deque()

    async def send(self, lease: SlotLease, task: Task, config: ModelConfig, *, attempt: int) -> Any:
        """Send the job, and record when the POST started and when it was answered."""
        begun = time.monotonic()
        if self._ends:
            self.gaps.append(begun - self._ends.popleft())
        answer = await super().send(lease, task, config, attempt=attempt)
        ended = time.monotonic()
        self.spans.append((begun, ended))
        self._ends.append(ended)
        return answer


async def dispatched(how: str, url: str, slots: int, jobs: int, caller: Watched) -> int:
    """Run all jobs with a dispatcher; return the number of jobs done."""
    backend = (
        MemoryBackend()
        if how == "memory"
        else RedisBackend(settings=RedisSettings(_env_file=None, url=how))
    )
    dispatcher = Dispatcher(backend, DispatchSettings(_env_file=None), caller=caller)
    registry, control = dispatcher.registry, control_of(backend)
    await registry.configure(MODEL, ModelConfig(queue_per_slot=jobs, queue_limit=jobs))
    await registry.register(MODEL, "gpu", url, slots, reports=False)
    for start in range(0, jobs, 100):
        await asyncio.gather(*(
            dispatcher.submit(Submission(model=MODEL, payload=PAYLOAD))
            for _ in range(start, min(start + 100, jobs))
        ))  # fmt: skip
    async with dispatcher:
        done = 0
        while done < jobs:
            await asyncio.sleep(0.1)
            done = (await control.ledger(queue_of(MODEL))).done
    await backend.aclose()
    return done


async def bare(url: str, slots: int, jobs: int, caller: Watched) -> int:
    """Send all jobs without a dispatcher, in one loop for each slot; return the number of responses."""
    left = iter(range(jobs))
    done = 0

    async def loop() -> None:
        nonlocal done
        lease = SlotLease(
            model=MODEL, server="gpu", url=url, holder="bench", token=MODEL, fence=0,
            state=Permit.ASSIGNED, expires_at=0,
        )  # fmt: skip
        for number in left:
            task = Task(key=MODEL, id=f"job-{number}", payload=PAYLOAD)
            await caller.send(lease, task, ModelConfig(), attempt=1)
            done += 1

    await asyncio.gather(*(loop() for _ in range(slots)))
    await caller.aclose()
    return done


async def main(how: str, url: str, slots: int, jobs: int) -> None:
    """Run one measurement and print its figures."""
    caller = Watched(DispatchSettings(_env_file=None))
    work = bare(url, slots, jobs, caller) if how == "bare" else None
    done = await (work or dispatched(how, url, slots, jobs, caller))
    print(json.dumps({"done": done, "gaps": caller.gaps, "spans": caller.spans}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
