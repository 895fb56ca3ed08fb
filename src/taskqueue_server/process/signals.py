"""What signals mean to a server: SIGTERM and SIGINT end it, SIGHUP has it read its settings anew."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_STDIN = 0


@contextlib.contextmanager
def signals(end: Callable[[], None], reload: Callable[[], None] | None = None) -> Iterator[None]:
    """Call these on signals as long as the context is open. Does nothing unless this is the main thread.

    Without ``reload``, SIGHUP does what it did before. A SIGHUP because the terminal was closed ends the server too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = os.isatty(_STDIN)

    def hang_up() -> None:
        gone = before and not os.isatty(_STDIN)
        (end if gone or reload is None else reload)()

    handlers = {signal.SIGTERM: end, signal.SIGINT: end}
    if reload is not None:
        handlers[signal.SIGHUP] = hang_up
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
