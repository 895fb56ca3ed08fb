"""Threads for synchronous handlers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Threads"]


class Threads:
    """A pool of daemon threads: unlike an executor's, one that hangs does not keep the process from ending."""

    def __init__(self, size: int) -> None:
        """Start threads when they are needed, ``size`` at the most."""
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
        """Let each thread end after what it runs now. Does not wait."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call
            with self._lock:
                self._idle += 1
