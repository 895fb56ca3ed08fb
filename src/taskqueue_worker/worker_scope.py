"""What the handlers of one run of a worker share: its connection, and the states of its registries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from taskqueue_core.application.connections import Connections
from taskqueue_core.application.dependencies import SHARED_DEPENDENCIES, SharedDependencies
from taskqueue_core.application.handler_scope import HANDLER_SCOPE
from taskqueue_core.application.registry import Tasks
from taskqueue_core.queue import Queue
from taskqueue_core.sync import LoopCalls, SyncQueue
from taskqueue_worker.child_processes import ChildProcesses
from taskqueue_worker.closing import Closing, OpenedLifespan


class WorkerScope:
    """What the handlers of one run share. It belongs to the event loop of the worker."""

    def __init__(self, open_queue: Callable[[], Queue]) -> None:
        """Create the scope. ``open_queue`` returns the worker's connection, always the same, without I/O."""
        self._open_queue = open_queue
        self._calls = LoopCalls(asyncio.get_running_loop())
        self._states: dict[Connections, Any] = {}
        self._closed = False
        self.closing = Closing()
        self.context = copy_context()
        """the context of the lifespans; handlers run in copies of it"""
        self.context.run(HANDLER_SCOPE.set, self)
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
        ``limit`` ends the opening when the worker is stopped. Raises what a lifespan raises, and what a shared
        dependency raises when it closes.
        """
        lifespans = {
            each: lifespan
            for registry in registries
            for each, lifespan in registry.lifespans().items()
        }
        try:
            async with AsyncExitStack() as stack:
                async with limit:
                    if self.children is not None:
                        await self.children.start_first()
                    for registry, lifespan in lifespans.items():
                        opened = OpenedLifespan(lifespan, self.closing, self.context)
                        self._states[registry] = await opened.state()
                        stack.push_async_exit(partial(_close, opened))
                functions = [each for tasks in registries for each in tasks.functions.values()]
                if any(each.arguments.dependencies for each in functions):
                    await stack.enter_async_context(self._shared_dependencies())
                yield
        finally:
            self._closed = True
            self._calls.close()

    @asynccontextmanager
    async def _shared_dependencies(self) -> AsyncIterator[None]:
        shared = SharedDependencies()
        self.context.run(SHARED_DEPENDENCIES.set, shared)
        async with AsyncExitStack() as stack:
            stack.push_async_exit(partial(self._close_shared, shared))
            yield

    async def _close_shared(
        self, shared: SharedDependencies, _kind: object, error: BaseException | None, _trace: object
    ) -> None:
        failure = error
        for name, manager in reversed(shared.opened):
            task = asyncio.create_task(_exit(manager, failure), context=self.context)
            try:
                await self.closing.wait(f"the shared dependency {name}", task)
            except BaseException as new:  # noqa: BLE001 - closing may raise any exception, and the others must close
                failure = new
        if failure is not None and failure is not error:
            raise failure


async def _close(
    lifespan: OpenedLifespan, _kind: object, error: BaseException | None, _trace: object
) -> None:
    await lifespan.close(error)


async def _exit(manager: AbstractAsyncContextManager[Any], failure: BaseException | None) -> None:
    trace = None if failure is None else failure.__traceback__
    await manager.__aexit__(None if failure is None else type(failure), failure, trace)
