"""The synchronous twin of `connect`, for code without an event loop: scripts, Django, Flask.

One background thread runs the loop; calls block until it answers. Safe for concurrent use from many
threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from taskqueue_core.backend import Backend
from taskqueue_core.queue import Queue, connect
from taskqueue_core.tasks import Confirmation, Ledger, Task, TaskStatus

__all__ = ["SyncQueue", "connect_sync"]

T = TypeVar("T")


@contextmanager
def connect_sync(backend: str | Backend | None = None) -> Iterator[SyncQueue]:
    """Open a queue like `taskqueue_core.queue.connect`. Must not be called in a running event loop's thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="taskqueue", daemon=True)
    thread.start()

    def call(coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    opened = connect(backend)
    try:
        queue = call(opened.__aenter__())
        try:
            yield SyncQueue(queue, loop)
        finally:
            call(opened.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class SyncQueue:
    """The methods of `Queue`, blocking."""

    def __init__(self, queue: Queue, loop: asyncio.AbstractEventLoop) -> None:
        """Run the calls of ``queue`` on ``loop``, which another thread runs."""
        self._queue = queue
        self._loop = loop

    def publish(self, key: str, payload: object = None, **options: Any) -> Confirmation:
        """See `Queue.publish`."""
        return self._call(self._queue.publish(key, payload, **options))

    def publish_many(self, tasks: Iterable[Task]) -> tuple[Confirmation, ...]:
        """See `Queue.publish_many`."""
        return self._call(self._queue.publish_many(tasks))

    def status(self, key: str, task_id: str) -> TaskStatus | None:
        """See `Queue.status`."""
        return self._call(self._queue.status(key, task_id))

    def result(self, key: str, task_id: str) -> Any:
        """See `Queue.result`."""
        return self._call(self._queue.result(key, task_id))

    def ledger(self, *keys: str) -> Ledger:
        """See `Queue.ledger`."""
        return self._call(self._queue.ledger(*keys))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
