"""The synchronous counterpart of `connect`, for code without an event loop: scripts, Django, Flask.

A background thread runs the event loop; calls block until they have a result. Many threads may make calls at once.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from typing_extensions import Unpack

from taskqueue_core.after import TaskRef
from taskqueue_core.authoring.listings import Filters
from taskqueue_core.backend import Backend
from taskqueue_core.concurrency import BlockingCalls
from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.queue import PublishOptions, Queue, connect
from taskqueue_core.queue_lists import OfQueue, SyncTaskList
from taskqueue_core.queue_schedules import QueueSchedules
from taskqueue_core.queue_workflows import QueueWorkflows
from taskqueue_core.schedule_status import ScheduleStatus
from taskqueue_core.schedules import Overlap, Schedule
from taskqueue_core.tasks import Confirmation, Ledger, Task, TaskStatus
from taskqueue_core.workflows import WorkflowPage, WorkflowStatus, WorkflowStep

T = TypeVar("T")


class SyncOnly(AbstractContextManager["SyncQueue"]):
    """A context manager that says what to write if it is used with ``async``."""

    def __init__(self, opened: AbstractContextManager[SyncQueue], name: str) -> None:
        """Wrap a context manager. ``name``: the name of the function that returns it."""
        self._opened = opened
        self._name = name

    def __enter__(self) -> SyncQueue:
        return self._opened.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._opened.__exit__(kind, error, traceback)

    async def __aenter__(self) -> NoReturn:
        raise ConfigurationError(
            f"connect_sync is for code that is not async: write 'with {self._name}(...)', or in async code 'async with "
            f"{self._name.removesuffix('_sync')}(...)'"
        )

    async def __aexit__(self, *error: object) -> None:
        """Do nothing: `__aenter__` always raises."""


def connect_sync(backend: str | Backend | None = None) -> AbstractContextManager[SyncQueue]:
    """Open a `SyncQueue`. ``backend`` is as in `taskqueue_core.queue.connect`.

    Raises `TaskQueueError` if an event loop runs in this thread, because calls would block it. When the ``with``
    block or the program ends, unfinished calls in other threads are cancelled, and the background thread ends. In a
    forked process, the first call opens the backend again, which needs its name.

    >>> with connect_sync("taskqueue_memory") as queue:
    ...     confirmation = queue.publish("mail", {"to": "ada"})
    """
    return SyncOnly(_connected(backend), "connect_sync")


@contextmanager
def _connected(backend: str | Backend | None) -> Iterator[SyncQueue]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        connection = _Connection(backend)
    else:
        raise TaskQueueError("connect_sync would block the running event loop: use connect")
    atexit.register(
        connection.close
    )  # for a block that does not end, as in a module of a web application
    try:
        yield SyncQueue(connection.queue, connection)
    finally:
        atexit.unregister(connection.close)
        connection.close()


class LoopCalls:
    """Blocking calls, from other threads, of coroutines in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make calls in ``loop``, until `close`."""
        self.loop = loop
        self._closed = False
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop, and return its result.

        Raises `TaskQueueError` in the thread of the loop, which the call would block, if the loop has stopped, and
        after `close`.
        """
        if asyncio._get_running_loop() is self.loop:  # noqa: SLF001 - get_running_loop raises an error without a loop
            coroutine.close()
            raise TaskQueueError(
                "this call would block the event loop, which must run it: await the async method instead, such as "
                "publish instead of publish_sync"
            )
        with self._lock:  # a call submitted after the loop has stopped would never return
            if self._closed:
                coroutine.close()
                raise TaskQueueError("the queue is closed")
            if not self.loop.is_running():
                coroutine.close()
                raise TaskQueueError(
                    "the event loop that opened the connection has stopped: open the connection with connect_sync"
                )
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._running.add(future)
        try:
            return future.result()
        except CancelledError:
            raise TaskQueueError("the queue was closed before the call ended") from None
        finally:
            self._running.discard(future)
            future.cancel()  # cancels the call if the caller was interrupted; no effect on a finished call

    def close(self) -> None:
        """Refuse further calls, and cancel those that have not ended. The event loop must be open."""
        with self._lock:
            self._closed = True
            running = tuple(self._running)
        for future in running:
            future.cancel()


class _Connection(LoopCalls):
    """A queue in the event loop of a thread, until `close`. In a forked process, the first call opens it again."""

    def __init__(self, backend: str | Backend | None) -> None:
        self._backend = backend
        self._inherited = False
        self._opening = threading.Lock()
        self.queue = self._open()
        _CONNECTIONS.add(self)

    def _open(self) -> Queue:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def run() -> None:
            stop = asyncio.Event()
            ready.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()

        self._thread = threading.Thread(
            target=lambda: asyncio.run(run()), name="taskqueue", daemon=True
        )
        self._thread.start()
        loop, self._stop = ready.result()
        super().__init__(loop)
        self._opened = connect(self._backend)
        try:
            return super().call(self._opened.__aenter__())
        except BaseException:
            self._end()
            raise

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, as `LoopCalls.call` does."""
        if self._inherited:
            try:
                self._open_again()
            except BaseException:
                coroutine.close()
                raise
        return super().call(coroutine)

    def _open_again(self) -> None:
        with self._opening:
            if not self._inherited:
                return
            if not isinstance(self._backend, str | None):
                raise TaskQueueError(
                    "this process was forked, and the connection is the one of its parent process: pass the name of "
                    "the backend to connect_sync, or call it after the fork"
                )
            state = vars(self._open())
            vars(self.queue).clear()
            vars(self.queue).update(state)  # handles have this queue
            self._inherited = False

    def after_fork(self) -> None:
        """Forget the thread and the connection of the parent process, and the locks of its threads."""
        self._lock, self._opening = threading.Lock(), threading.Lock()
        if not self._closed and not self._inherited:
            self._inherited = True
            _OF_PARENTS.append((self.loop, self._thread, self._opened, dict(vars(self.queue))))

    def close(self) -> None:
        """Close the connection, and end the thread. Idempotent."""
        if self._closed:
            return
        if self._inherited:
            self._closed, self._inherited = True, False
            return
        try:
            super().call(self._opened.__aexit__(None, None, None))
        finally:
            self._end()

    def _end(self) -> None:
        super().close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


_CONNECTIONS: WeakSet[_Connection] = WeakSet()
_OF_PARENTS: list[object] = []
"""in a forked process: what is kept, because closing it would also stop the parent's event loop from reading it"""


def _after_fork() -> None:
    for connection in list(_CONNECTIONS):
        connection.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


class SyncQueue:
    """A `Queue` whose methods block until they have a result.

    >>> with connect_sync("taskqueue_memory") as queue:
    ...     confirmation = queue.publish("mail", {"to": "ada"}, id="welcome-ada")
    ...     print(queue.status("mail", "welcome-ada").state)
    waiting
    """

    def __init__(self, queue: Queue, loop: BlockingCalls) -> None:
        """Make the calls of ``queue`` in the event loop to which it belongs."""
        self.queue = queue
        """the async counterpart, which belongs to another event loop"""
        self._loop = loop

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop of `queue`, and return its result."""
        return self._loop.call(call)

    def publish(
        self, key: str, payload: object = None, **options: Unpack[PublishOptions]
    ) -> Confirmation:
        """Publish one task; see `Queue.publish`."""
        return self._loop.call(self.queue.publish(key, payload, **options))

    def publish_many(self, tasks: Iterable[Task], *, wait: float = 0) -> tuple[Confirmation, ...]:
        """Publish tasks in batches; see `Queue.publish_many`."""
        return self._loop.call(self.queue.publish_many(tasks, wait=wait))

    def status(self, key: str, task_id: str) -> TaskStatus | None:
        """Return the status of a task; see `Queue.status`."""
        return self._loop.call(self.queue.status(key, task_id))

    def result(self, key: str, task_id: str) -> Any:
        """Return a task's decoded result; see `Queue.result`."""
        return self._loop.call(self.queue.result(key, task_id))

    @cached_property
    def schedules(self) -> SyncSchedules:
        """The schedules in the store; see `Queue.schedules`."""
        return SyncSchedules(self.queue.schedules, self._loop)

    @cached_property
    def workflows(self) -> SyncWorkflows:
        """The workflows in the store, as data; see `Queue.workflows`."""
        return SyncWorkflows(self.queue.workflows, self._loop)

    def tasks(self, of: str | OfQueue, **filters: Unpack[Filters]) -> SyncTaskList:
        """Return the tasks of a queue that are in a state, or that have a tag; see `Queue.tasks`."""
        return SyncTaskList(self.queue.tasks(of, **filters), self._loop)

    def ledger(self, *keys: str) -> Ledger:
        """Return the sum of the ledgers of the given queues, or of all queues; see `Queue.ledger`."""
        return self._loop.call(self.queue.ledger(*keys))


class SyncWorkflows:
    """`QueueWorkflows` whose methods block until they have a result."""

    def __init__(self, workflows: QueueWorkflows, loop: BlockingCalls) -> None:
        """Make the calls of ``workflows`` in the event loop to which they belong."""
        self._workflows = workflows
        self._loop = loop

    def put(self, steps: Sequence[WorkflowStep], *, id: str | None = None) -> Confirmation:  # noqa: A002 - as in `Task`
        """Store a workflow; see `QueueWorkflows.put`."""
        return self._loop.call(self._workflows.put(steps, id=id))

    def add(self, steps: Sequence[WorkflowStep], *, by: TaskRef) -> Confirmation:
        """Store the steps that a running step adds; see `QueueWorkflows.add`."""
        return self._loop.call(self._workflows.add(steps, by=by))

    def get(self, workflow: str) -> WorkflowStatus | None:
        """Return what became of a workflow; see `QueueWorkflows.get`."""
        return self._loop.call(self._workflows.get(workflow))

    def list(self, *, after: str | None = None, limit: int = 20) -> WorkflowPage:
        """Return a page of workflows; see `QueueWorkflows.list`."""
        return self._loop.call(self._workflows.list(after=after, limit=limit))

    def cancel(self, workflow: str) -> bool:
        """Cancel a workflow; see `QueueWorkflows.cancel`."""
        return self._loop.call(self._workflows.cancel(workflow))

    def wait(self, workflow: str) -> WorkflowStatus | None:
        """Return the status of a workflow at its end; see `QueueWorkflows.wait`."""
        return self._loop.call(self._workflows.wait(workflow))


class SyncSchedules:
    """`QueueSchedules` whose methods block until they have a result.

    >>> queue.schedules.put(Schedule("cats", Every(3600), resize.call("cats.png")))
    """

    def __init__(self, schedules: QueueSchedules, loop: BlockingCalls) -> None:
        """Make the calls of ``schedules`` in the event loop to which they belong."""
        self._schedules = schedules
        self._loop = loop

    def put(self, schedule: Schedule, *, version: int | None = None) -> ScheduleStatus:
        """Create or replace a schedule; see `QueueSchedules.put`."""
        return self._loop.call(self._schedules.put(schedule, version=version))

    def get(self, name: str) -> ScheduleStatus | None:
        """Return a schedule; see `QueueSchedules.get`."""
        return self._loop.call(self._schedules.get(name))

    def list(self, *, after: str | None = None, limit: int = 100) -> tuple[ScheduleStatus, ...]:
        """Return a page of schedules; see `QueueSchedules.list`."""
        return self._loop.call(self._schedules.list(after=after, limit=limit))

    def pause(self, name: str) -> ScheduleStatus:
        """Pause a schedule; see `QueueSchedules.pause`."""
        return self._loop.call(self._schedules.pause(name))

    def resume(self, name: str) -> ScheduleStatus:
        """Resume a schedule; see `QueueSchedules.resume`."""
        return self._loop.call(self._schedules.resume(name))

    def delete(self, name: str, *, version: int | None = None) -> bool:
        """Delete a schedule; see `QueueSchedules.delete`."""
        return self._loop.call(self._schedules.delete(name, version=version))

    def next(self, name: str, count: int = 5) -> tuple[float, ...]:
        """Return the next instants; see `QueueSchedules.next`."""
        return self._loop.call(self._schedules.next(name, count))

    def trigger(self, name: str, *, overlap: Overlap | None = None) -> Confirmation:
        """Publish the task now; see `QueueSchedules.trigger`."""
        return self._loop.call(self._schedules.trigger(name, overlap=overlap))

    def backfill(
        self,
        name: str,
        since: float | datetime,
        until: float | datetime,
        *,
        overlap: Overlap = "allow",
    ) -> tuple[Confirmation, ...]:
        """Publish the tasks of past instants; see `QueueSchedules.backfill`."""
        return self._loop.call(self._schedules.backfill(name, since, until, overlap=overlap))
