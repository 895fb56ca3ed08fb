"""What a worker provides to the code inside its handlers, found through a context variable."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Protocol

from taskqueue_core.queue import Queue
from taskqueue_core.sync import SyncQueue


class HandlerScope(Protocol):
    """What a worker provides to the code inside one call of a handler. A worker implements it."""

    def queue(self) -> Queue | None:
        """Return the worker's connection; ``None`` in another event loop, or after the worker has ended."""

    def waiting(self, queue: Queue, key: str, task_id: str) -> AbstractAsyncContextManager[None]:
        """Lend the handler's slot while it waits for the end of a task. Raises `WouldBlock` if it would wait for ever.

        Raises it also in a thread or a child process of the worker. At the end, the handler waits until a slot is free.
        """

    def resumed(self) -> AbstractAsyncContextManager[None]:
        """Let the handler have its slot, although other parts of it still wait."""

    def sync_queue(self) -> SyncQueue | None:
        """Return the worker's connection for blocking calls in threads; ``None`` after the worker has ended."""


HANDLER_SCOPE: ContextVar[HandlerScope | None] = ContextVar("taskqueue_handler", default=None)
"""the scope of the running handler, also in the tasks and threads that it starts; ``None`` outside handlers"""
