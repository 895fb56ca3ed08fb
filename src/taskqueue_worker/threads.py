"""Threads for synchronous handlers, and a way from any thread into an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar


class Threads:
    """A pool of daemon threads. Unlike an executor's, a thread that hangs does not prevent the process from ending."""

    def __init__(self, size: int) -> None:
        """Start threads on demand, at most ``size``."""
        self._size = size
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call`` in a thread as soon as one is free. It must not raise."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._started < self._size:
                self._started += 1
                name = f"taskqueue-handler-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put(call)

    def close(self) -> None:
        """End each thread after its current call. Does not wait."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._lock:
                self._idle += 1


T = TypeVar("T")


class ThreadsafeInbox(Generic[T]):
    """A queue into an event loop. Items that are put while the loop is busy are handled in one call, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[list[T]], None]) -> None:
        """Call ``handle`` in ``loop``, with at least one item."""
        self._loop = loop
        self._handle = handle
        self._lock = threading.Lock()
        self._items: list[T] = []

    def put(self, item: T) -> None:
        """Add an item; drop it if the loop is closed. Never blocks, never raises."""
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
