"""The process of a worker: signals that stop it, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
END_SECONDS = 10.0
"""seconds after the second signal, or after the end of the worker, in which its process must end"""
_LOG_SECONDS = 1.0
_log = logging.getLogger("taskqueue.worker")


class ProcessEnd:
    """Ends this process if something keeps it from ending. Thread-safe; also works while the event loop is blocked."""

    def __init__(self) -> None:
        """Create an object that does nothing yet."""
        self.unfinished: Callable[[], str | None] = lambda: None
        """returns what keeps the process, if it is known"""
        self._timer: threading.Timer | None = None

    def begin(self, seconds: float) -> None:
        """End the process with exit code 1 in this number of seconds, unless `cancel` is called before."""
        if self._timer is None:
            self._timer = threading.Timer(seconds, self._end, [seconds])
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """Let the process run."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, seconds: float) -> None:
        what = self.unfinished() or "a thread, or an asyncio task that ignores its cancellation,"
        text = "%s keeps the process from ending; it ends now, after %g s"
        # The lock of a log handler may be what the process waits for.
        logging_it = threading.Thread(target=_log.error, args=(text, what, seconds), daemon=True)
        logging_it.start()
        logging_it.join(_LOG_SECONDS)
        os._exit(1)


_process_end: ContextVar[ProcessEnd | None] = ContextVar("taskqueue_process_end", default=None)


def run_process(main: Coroutine[Any, Any, T], end: ProcessEnd | None = None) -> T:
    """Run ``main`` as `asyncio.run` does, in a process that is only a worker.

    What hangs is given up, with the process, `END_SECONDS` after the second signal, or after the end of ``main``; or
    after ``main`` has begun the ``end`` itself.
    """
    end = end or ProcessEnd()

    async def run() -> T:
        _process_end.set(end)
        try:
            return await main
        finally:
            end.begin(END_SECONDS)

    try:
        return asyncio.run(run())
    finally:
        end.cancel()


@asynccontextmanager
async def stopped_by_signals(
    stop: Callable[[], None], unfinished: Callable[[], str | None]
) -> AsyncIterator[None]:
    """Call ``stop`` in the event loop at each SIGTERM and SIGINT.

    In `run_process`, the second one begins the end of the process; ``unfinished`` is as in `ProcessEnd`.
    """
    loop = asyncio.get_running_loop()
    previous = {}
    received = 0
    if (end := _process_end.get()) is not None:
        end.unfinished = unfinished

    def receive(*_: object) -> None:
        nonlocal received
        received += 1
        if received > 1 and end is not None:
            end.begin(END_SECONDS)
        loop.call_soon_threadsafe(stop)

    # `loop.add_signal_handler` does not exist on Windows. A handler runs between two instructions of the main
    # thread, so it only schedules the call; `call_soon_threadsafe` also wakes the loop.
    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
