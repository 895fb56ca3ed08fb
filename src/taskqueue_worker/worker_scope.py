"""What the handlers of one run of a worker share: its connection, and the states of its registries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from taskqueue_core.application.connections import Connections
from taskqueue_core.application.dependencies import shared_dependencies
from taskqueue_core.application.handler_scope import HANDLER_SCOPE
from taskqueue_core.application.registry import Tasks
from taskqueue_core.queue import Queue
from taskqueue_core.sync import LoopCalls, SyncQueue
from taskqueue_worker.child_processes import ChildProcesses


class WorkerScope:
    """What the handlers of one run share. It belongs to the event loop of the worker."""

    def __init__(self, open_queue: Callable[[], Queue]) -> None:
        """Create the scope. ``open_queue`` returns the worker's connection, always the same, without I/O."""
        self._open_queue = open_queue
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._states: dict[Connections, Any] = {}
        self._closed = False
        self.children: ChildProcesses | None = None
        """the child processes of tasks with ``run="process"``; without them, those run as other tasks do"""

    def queue(self) -> Queue | None:
        """Return the worker's connection; ``None`` in another event loop, or after the worker has ended."""
        loop = asyncio._get_running_loop()  # noqa: SLF001 - get_running_loop raises an error without a loop
        return None if self._closed or loop not in (None, self._calls.loop) else self._open_queue()

    def is_here(self) -> bool:
        """Return whether the caller runs in the event loop that has the worker's slots."""
        return asyncio._get_running_loop() is self._calls.loop  # noqa: SLF001 - as above

    def sync_queue(self) -> SyncQueue | None:
        """Return the worker's connection for blocking calls in threads; ``None`` after the worker has ended."""
        return None if self._closed else SyncQueue(self._open_queue(), self._calls)

    @asynccontextmanager
    async def waiting(self, _queue: Queue, _key: str, _task_id: str) -> AsyncIterator[None]:
        """Do nothing: a lifespan has no slot to lend."""
        yield

    @asynccontextmanager
    async def resumed(self) -> AsyncIterator[None]:
        """Do nothing: a lifespan has no slot to lend."""
        yield

    def state_of(self, registry: Connections) -> Any:
        """Return what the lifespan of a registry yielded, or of the nearest one that includes it, or ``None``."""
        if not self._states:
            return None
        for each in (registry, *registry.ancestors()):
            if each in self._states:
                return self._states[each]
        return None

    @asynccontextmanager
    async def open(
        self, registries: Sequence[Tasks], limit: asyncio.Timeout
    ) -> AsyncIterator[None]:
        """Open the lifespans, in which the worker's connection can be used; close them in the reverse order.

        Before the lifespans, the first child process starts, because it shows whether the tasks can be imported.
        ``limit`` ends the opening when the worker is stopped. Handlers run in copies of this context.
        """
        lifespans = {
            each: lifespan
            for registry in registries
            for each, lifespan in registry.lifespans().items()
        }
        token = HANDLER_SCOPE.set(self)
        try:
            async with AsyncExitStack() as stack:
                async with limit:
                    if self.children is not None:
                        await self.children.start_first()
                    for registry, lifespan in lifespans.items():
                        self._states[registry] = await stack.enter_async_context(lifespan())
                functions = [each for tasks in registries for each in tasks.functions.values()]
                if any(each.arguments.dependencies for each in functions):
                    await stack.enter_async_context(shared_dependencies())
                yield
        finally:
            HANDLER_SCOPE.reset(token)
            self._closed = True
            self._calls.close()
