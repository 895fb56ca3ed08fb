"""What a worker provides to the code inside its handlers, found through a context variable."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Protocol

from taskqueue_core.queue import Queue
from taskqueue_core.sync import SyncQueue


class HandlerScope(Protocol):
    """What a worker provides to the code inside one call of a handler. A worker implements it."""

    def queue(self) -> Queue | None:
        """Return the worker's connection; ``None`` in another event loop, or after the worker has ended."""

    def sync_queue(self) -> SyncQueue | None:
        """Return the worker's connection for blocking calls in threads; ``None`` after the worker has ended."""


HANDLER_SCOPE: ContextVar[HandlerScope | None] = ContextVar("taskqueue_handler", default=None)
"""the scope of the running handler, also in the tasks and threads that it starts; ``None`` outside handlers"""
