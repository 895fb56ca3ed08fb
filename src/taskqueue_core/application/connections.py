"""The connections through which the tasks of a registry are published, and its middleware."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Any, Self

from taskqueue_core.application.call import Call
from taskqueue_core.application.codecs import AnyCodec
from taskqueue_core.application.encoding import Encoding
from taskqueue_core.application.errors import NotConnected
from taskqueue_core.application.handler_scope import HANDLER_SCOPE
from taskqueue_core.application.handles import Handle
from taskqueue_core.application.middleware import Middleware
from taskqueue_core.application.publishing import checked_calls, publish_calls
from taskqueue_core.application.sync_handles import SyncHandle
from taskqueue_core.backend import Backend
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import kind_of
from taskqueue_core.queue import AsyncOnly, Queue, connect
from taskqueue_core.sync import LoopCalls, SyncOnly, SyncQueue, connect_sync

_NOT_CONNECTED = (
    "{} needs a connection: pass one with .using(on=queue), publish inside a handler, which uses the "
    "connection of its worker, or write 'async with tasks.connect(...)' ('with tasks.connect_sync(...)' in code that "
    "is not async); in a test, include its registry in the one that the TestQueue was given, as in "
    "'tasks.include(other_tasks)'"
)
_ONLY_BLOCKING = (
    "{} needs another connection: the open one of its registry is for code that is not async ('with "
    "tasks.connect_sync(...)'): use publish_sync, publish_many_sync or handle_sync, or open one "
    "here with 'async with tasks.connect(...)'"
)


class Connections:
    """The open connections, the middleware and the codec of a registry, and of the registries that include it."""

    def __init__(
        self, middleware: Sequence[Middleware] = (), codec: AnyCodec | None = None
    ) -> None:
        """Create a registry without connections.

        Raises `ConfigurationError` if ``middleware`` or ``codec`` is not such.
        """
        for each in middleware:
            if isinstance(each, type) or not all(
                inspect.iscoroutinefunction(getattr(each, name, None))
                for name in ("publish", "run")
            ):
                kind = each.__name__ if isinstance(each, type) else type(each).__name__
                raise ConfigurationError(
                    f"middleware: got {kind}; expected objects of subclasses of Middleware, as in [{kind}()], whose "
                    "methods publish and run are async"
                )
        self._middleware = tuple(middleware)
        self.encoding = None if codec is None else Encoding(codec)
        """what encodes payloads, results and errors; ``None`` without a codec"""
        self._parents: list[Self] = []
        self._queues: list[tuple[Queue, SyncQueue]] = []
        self._sync_queues: list[SyncQueue] = []
        self._replacement: tuple[Queue, SyncQueue] | None = None

    def ancestors(self) -> Iterator[Self]:
        """Yield the registries that include this one, the nearest first."""
        for parent in self._parents:
            yield parent
            yield from parent.ancestors()

    @property
    def middleware(self) -> tuple[Middleware, ...]:
        """The middleware of this registry, and before it that of those that include it: the outermost first."""
        if not self._parents:
            return self._middleware
        outer = dict.fromkeys(
            reversed([*self.ancestors()])
        )  # each once, however often it is included
        return (*(each for one in outer for each in one._middleware), *self._middleware)  # noqa: SLF001 - the same class

    def connect(
        self, backend: str | Backend | Queue | None = None
    ) -> AbstractAsyncContextManager[Queue]:
        """Open the connection through which this registry's tasks are published, and close it at the end.

        ``backend`` is as in `taskqueue_core.connect`. A `Queue` that is passed is used, and not closed. Handlers use
        the connection of their worker instead. Blocking calls in other threads use it, too, unless `connect_sync` has
        opened one.

        >>> async with tasks.connect("server"):
        ...     await resize.publish("cat.png")
        """
        return AsyncOnly(self._connected(backend), "tasks.connect")

    @asynccontextmanager
    async def _connected(self, backend: str | Backend | Queue | None) -> AsyncIterator[Queue]:
        if (replacement := self._replaced()) is not None:
            yield replacement[0]
            return
        if isinstance(backend, Queue):
            calls = LoopCalls(asyncio.get_running_loop())
            opened = backend, SyncQueue(backend, calls)
            self._queues.append(opened)
            try:
                yield backend
            finally:
                self._queues.remove(opened)
                calls.close()
            return
        async with connect(backend) as queue, self._connected(queue):
            yield queue

    def connect_sync(
        self, backend: str | Backend | SyncQueue | None = None
    ) -> AbstractContextManager[SyncQueue]:
        """Open the connection for code without an event loop, and close it at the end. Thread-safe.

        The end of the program closes it, too. A forked process opens its own with its first call.

        >>> with tasks.connect_sync("server"):
        ...     resize.publish_sync("cat.png")
        """
        return SyncOnly(self._connected_sync(backend), "tasks.connect_sync")

    @contextmanager
    def _connected_sync(self, backend: str | Backend | SyncQueue | None) -> Iterator[SyncQueue]:
        if (replacement := self._replaced()) is not None:
            yield replacement[1]
            return
        if isinstance(backend, SyncQueue):
            self._sync_queues.append(backend)
            try:
                yield backend
            finally:
                self._sync_queues.remove(backend)
            return
        with connect_sync(backend) as queue, self._connected_sync(queue):
            yield queue

    @contextmanager
    def replaced_by(self, queue: Queue, sync_queue: SyncQueue) -> Iterator[None]:
        """Use these connections in place of all that an application opens, until the end of the block: for tests."""
        before, self._replacement = self._replacement, (queue, sync_queue)
        try:
            yield
        finally:
            self._replacement = before

    def _replaced(self) -> tuple[Queue, SyncQueue] | None:
        for each in self._with_ancestors():
            if each._replacement is not None:  # noqa: SLF001 - an attribute of the same class
                return each._replacement  # noqa: SLF001
        return None

    def _with_ancestors(self) -> tuple[Self, ...]:
        return (self, *self.ancestors()) if self._parents else (self,)

    def queue(self, given: Queue | SyncQueue | None = None, task: str | None = None) -> Queue:
        """Return the connection for an async call: ``given``, the worker's own inside a handler, or the open one.

        ``task``: the name of the task that needs it. Raises `NotConnected`, which names it, if there is none, and
        `InvalidInput` if ``given`` is no `Queue`.
        """
        if given is None:
            scope = HANDLER_SCOPE.get()
            if scope is not None and (own := scope.queue()) is not None:
                return own
            if (
                self._queues and not self._parents and self._replacement is None
            ):  # fast for each publish
                return self._queues[-1][0]
            if (replacement := self._replaced()) is not None:
                return replacement[0]
            for registry in self._with_ancestors():
                if queues := registry._queues:  # noqa: SLF001 - an attribute of the same class
                    return queues[-1][0]
            if any(each._sync_queues for each in self._with_ancestors()):  # noqa: SLF001 - as above
                raise NotConnected(_ONLY_BLOCKING.format(_user(task)))
        elif isinstance(given, Queue):
            return given
        else:
            raise InvalidInput("on", kind_of(given), "a Queue; in blocking calls, a SyncQueue")
        raise NotConnected(_NOT_CONNECTED.format(_user(task)))

    def sync_queue(
        self, given: Queue | SyncQueue | None = None, task: str | None = None
    ) -> SyncQueue:
        """Return the connection for a blocking call, as `queue` does; in another thread, also that of an event loop."""
        if given is None:
            scope = HANDLER_SCOPE.get()
            if scope is not None and (own := scope.sync_queue()) is not None:
                return own
            if (replacement := self._replaced()) is not None:
                return replacement[1]
            for registry in self._with_ancestors():
                if sync_queues := registry._sync_queues:  # noqa: SLF001 - an attribute of the same class
                    return sync_queues[-1]
                if queues := registry._queues:  # noqa: SLF001 - an attribute of the same class
                    return queues[-1][1]
        elif isinstance(given, SyncQueue):
            return given
        else:
            raise InvalidInput("on", kind_of(given), "a SyncQueue; in async calls, a Queue")
        raise NotConnected(_NOT_CONNECTED.format(_user(task)))

    async def publish_many(
        self, calls: Iterable[Call[Any]], *, wait: float = 0
    ) -> list[Handle[Any]]:
        """Publish calls in batches, and return their handles in order.

        A refused call has a handle, too: its ``confirmation`` says why. ``wait`` is the number of seconds to wait, in
        total, while queues are full; the option ``wait`` of a call has no effect here. Raises
        `NotConnected`, `InvalidInput` and `BackendUnavailable`.

        >>> handles = await tasks.publish_many(resize.call(name) for name in names)
        """
        return await publish_calls(self.queue(), checked_calls(calls), wait)

    def publish_many_sync(
        self, calls: Iterable[Call[Any]], *, wait: float = 0
    ) -> list[SyncHandle[Any]]:
        """Publish calls as `publish_many` does, from code without an event loop.

        >>> handles = tasks.publish_many_sync(resize.call(name) for name in names)
        """
        queue = self.sync_queue()
        handles = queue.run(publish_calls(queue.queue, checked_calls(calls), wait))
        return [SyncHandle(queue, handle) for handle in handles]


def _user(task: str | None) -> str:
    return "publishing" if task is None else f"the task {task!r}"
