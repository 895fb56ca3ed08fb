"""Threads for synchronous handlers, and a queue through which any thread passes items to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar


class Threads:
    """A pool of daemon threads. Unlike with `ThreadPoolExecutor`, a call that hangs does not keep the process alive."""

    def __init__(self, size: int) -> None:
        """Create the pool without threads. Threads are started on demand, up to ``size``."""
        self._size = size
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0

    def submit(self, call: Callable[[], None]) -> None:
        """Run ``call`` as soon as a thread is free. ``call`` must not raise an exception."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._started < self._size:
                self._started += 1
                name = f"taskqueue-handler-{self._started}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
        self._calls.put(call)

    def close(self) -> None:
        """Let the threads end after all calls submitted so far, without waiting for them."""
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
    """A queue that passes items from any thread to an event loop.

    Items that are added while the loop is busy are handled together in one call, in order.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[list[T]], None]) -> None:
        """Create an empty queue. ``handle`` is called in ``loop`` with a list of at least one item."""
        self._loop = loop
        self._handle = handle
        self._items: deque[T] = deque()
        self._awaits_flush = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item, or discard it if the loop is closed. Never blocks and never raises an exception."""
        self._items.append(item)
        if not self._awaits_flush:
            self._awaits_flush = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Handle the items that were added so far. Only the loop calls this."""
        # This needs no lock: an item is added before `put` looks at the mark, and taken after the mark is removed here.
        # Two threads that see no mark cause a second call, which may find nothing.
        self._awaits_flush = False
        if items := [self._items.popleft() for _ in range(len(self._items))]:
            self._handle(items)
