"""Declared tasks for tests of workflows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from taskqueue_core import Codec, Middleware, Queue, Reject, Tasks
from taskqueue_core.backend import Backend
from taskqueue_memory import MemoryBackend

SECONDS = 60


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(SECONDS):
        while not await condition():  # noqa: ASYNC110 - no event signals an arbitrary condition
            await asyncio.sleep(0.01)


class Flows:
    """A registry, and what its tasks have seen."""

    def __init__(self, *middleware: Middleware, codec: Codec | None = None) -> None:
        self.tasks = Tasks(prefix="flow.", middleware=middleware, codec=codec)
        self.ran: list[str] = []
        self.broken = True
        """whether the task `breaks` fails"""
        self.started = asyncio.Event()
        self.backend: Backend = MemoryBackend()
        """the store on which they run"""

        @self.tasks.task
        async def size(name: str) -> int:
            self.ran.append(f"size {name}")
            return len(name)

        @self.tasks.task
        async def total(numbers: list[int], label: str = "sum") -> dict[str, int]:
            self.ran.append(f"total {numbers}")
            return {label: sum(numbers)}

        @self.tasks.task
        async def double(number: int) -> int:
            self.ran.append(f"double {number}")
            return 2 * number

        @self.tasks.task
        async def note(text: str) -> None:
            self.ran.append(text)

        @self.tasks.task
        async def maybe(number: int | None) -> str:
            self.ran.append(f"maybe {number}")
            return str(number)

        @self.tasks.task
        async def breaks() -> int:
            if self.broken:
                raise Reject("broken")
            self.ran.append("mended")
            return 7

        @self.tasks.task
        async def hangs() -> None:
            self.started.set()
            await asyncio.Event().wait()

        self.size, self.total, self.double, self.note = size, total, double, note
        self.maybe, self.breaks, self.hangs = maybe, breaks, hangs


@asynccontextmanager
async def memory(flows: Flows) -> AsyncIterator[MemoryBackend]:
    """Open a store without a worker."""
    backend = MemoryBackend()
    async with flows.tasks.connect(Queue(backend)):
        yield backend
    await backend.aclose()
