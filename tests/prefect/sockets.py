"""Support for tests of the plugin's socket handler, without Prefect and without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend
from taskqueue_prefect import batching
from taskqueue_prefect.delivery import SharedQueueDelivery
from taskqueue_prefect.task_runs import StoredRun, size_fault
from tests.prefect.support import KEY, task_run

A, B = "0f4c1b1e-6c1f-4c39-9a1c-0d0f6b1f7a55", "0f4c1b1e-6c1f-4c39-9a1c-0d0f6b1f7a56"
STATE = "a2b7b1f0-55f4-4b1c-8f55-3f2c9a0d7c11"
SAID: dict[str, str] = {}
"""the JSON content of a run as sent to a worker"""
Handler = Callable[[SharedQueueDelivery], Awaitable[None]]


class Odd(Exception):
    """The exception that ends a handler in a test."""


class Place:
    """A backend that acts as the plugin's host; in its imitated database every run is scheduled."""

    def __init__(self) -> None:
        self.backend = MemoryBackend()
        self.control = self.backend.control
        self.begun: list[asyncio.Task[Any]] = []

    def forget(self) -> None:
        """Do nothing, because this host caches nothing."""

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start background work, and remember it."""
        self.begun.append(asyncio.create_task(work))
        return self.begun[-1]

    async def handle(self, handler: Handler) -> None:
        """Run a socket's handler to its end, and wait for the work that it has started."""

        async def handled() -> None:
            await handler(SharedQueueDelivery(self, [KEY]))  # type: ignore[arg-type] # as much of a host as it takes

        async with asyncio.timeout(10):
            (ended,) = await asyncio.gather(asyncio.create_task(handled()), return_exceptions=True)
        if ended is not None and not isinstance(ended, (Odd, asyncio.CancelledError)):
            raise ended
        await asyncio.sleep(0)
        await asyncio.gather(*self.begun)

    async def publish(self, name: str) -> None:
        """Publish a run."""
        run = task_run(KEY, id=name)
        run["state"] |= {"id": STATE, "timestamp": "2026-01-01T00:00:00Z"}
        await self.backend.publisher.publish(
            Task(key=KEY, id=name, payload=json.dumps(run).encode())
        )

    async def state(self, name: str) -> State:
        """Return the state of a run in the queue."""
        (status,) = await self.control.statuses(KEY, name)
        assert status is not None
        return status.state


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place in which Prefect's database reports every run as scheduled."""

    async def read(names: Sequence[str]) -> list[StoredRun]:
        return [
            StoredRun(
                id=name,
                task_key=KEY,
                state_id=STATE,
                state_time=datetime.now(UTC),
                deferred=True,
                message=dict(SAID),
                fault=size_fault(SAID),
            )
            for name in names
        ]

    monkeypatch.setattr(batching, "read_runs", read)
    return Place()
