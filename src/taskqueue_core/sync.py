"""The synchronous twin of `connect`, for code without an event loop: scripts, Django, Flask.

One background thread runs the loop; calls block until it answers. Safe for concurrent use from many threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import Any, TypeVar

from taskqueue_core.backend import Backend
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.queue import Queue, connect
from taskqueue_core.tasks import Confirmation, Ledger, Task, TaskStatus

T = TypeVar("T")


@contextmanager
def connect_sync(backend: str | Backend | None = None) -> Iterator[SyncQueue]:
    """Open a queue like `taskqueue_core.queue.connect`.

    Raises `TaskQueueError` in a coroutine, whose loop it would block. At the end calls that are still under way
    in other threads are cancelled, and the background thread ends.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop = _Loop()
    else:
        raise TaskQueueError("connect_sync would block the running event loop: use connect")
    try:
        opened = connect(backend)
        queue = loop.call(opened.__aenter__())
        try:
            yield SyncQueue(queue, loop)
        finally:
            loop.call(opened.__aexit__(None, None, None))
    finally:
        loop.close()


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=asyncio.run, args=(_until_stopped(ready),), name="taskqueue", daemon=True
        )
        self._thread.start()
        self._loop, self._stop = ready.result()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._lock:  # what comes after the stop would never be answered
            if self._closed:
                coroutine.close()
                raise TaskQueueError("the queue is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise TaskQueueError("the queue was closed before the call ended") from None
        finally:
            future.cancel()  # an interrupted caller takes its call along; harmless after the answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def _until_stopped(
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]],
) -> None:
    stop = asyncio.Event()
    ready.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()


class SyncQueue:
    """The methods of `Queue`, blocking."""

    def __init__(self, queue: Queue, loop: _Loop) -> None:
        """Run the calls of ``queue`` on ``loop``."""
        self._queue = queue
        self._loop = loop

    def publish(self, key: str, payload: object = None, **options: Any) -> Confirmation:
        """See `Queue.publish`."""
        return self._loop.call(self._queue.publish(key, payload, **options))

    def publish_many(self, tasks: Iterable[Task], *, wait: float = 0) -> tuple[Confirmation, ...]:
        """See `Queue.publish_many`."""
        return self._loop.call(self._queue.publish_many(tasks, wait=wait))

    def status(self, key: str, task_id: str) -> TaskStatus | None:
        """See `Queue.status`."""
        return self._loop.call(self._queue.status(key, task_id))

    def result(self, key: str, task_id: str) -> Any:
        """See `Queue.result`."""
        return self._loop.call(self._queue.result(key, task_id))

    def ledger(self, *keys: str) -> Ledger:
        """See `Queue.ledger`."""
        return self._loop.call(self._queue.ledger(*keys))
