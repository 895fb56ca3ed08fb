"""Run a server in a thread with its own event loop, for tests that start programs and wait for them to exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from taskqueue_server import ServerProcess

_SECONDS = 60.0


@contextmanager
def in_thread(server: ServerProcess) -> Iterator[ServerProcess]:
    """Run a server in a thread until the end of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.run(),))
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.ready.wait(), loop).result(_SECONDS)
        yield server
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(_SECONDS)
        assert not thread.is_alive()
        loop.close()
