"""Hand things over to an event loop from any thread, in batches."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """What is put in while the loop is busy is handled in one call, in order; nothing once the loop is closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[list[T]], None]) -> None:
        """``handle`` is called in ``loop``, with at least one item."""
        self._loop = loop
        self._handle = handle
        self._lock = threading.Lock()
        self._items: list[T] = []

    def put(self, item: T) -> None:
        """Add an item. Never blocks, never raises."""
        with self._lock:
            self._items.append(item)
            if len(self._items) > 1:
                return
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        self._handle(items)
