"""A worker program for tests in which the process ends abnormally; its argument is the URL of the server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time

from taskqueue_worker import Context, Worker

logging.basicConfig(level=logging.INFO)
worker = Worker(url=sys.argv[1], grace=float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)


@worker.task("exit")
def exit_hard() -> None:
    """Exit at once, without any cleanup."""
    os._exit(9)


@worker.task("kill")
def kill() -> None:
    """Kill the process, as the kernel does when memory is low."""
    os.kill(os.getpid(), signal.SIGKILL)


@worker.task("sys.exit")
async def exit_softly() -> None:
    """Exit with a code other than 0, from a coroutine."""
    sys.exit(7)


@worker.task("sys.exit.thread")
def exit_from_thread() -> None:
    """Exit with a code other than 0, from a thread."""
    sys.exit(7)


@worker.task("interrupt")
async def interrupt() -> None:
    """Raise `KeyboardInterrupt`, as if the operator's Ctrl-C had interrupted the handler."""
    raise KeyboardInterrupt


@worker.task("sleep")
async def sleep(seconds: float, context: Context) -> str:
    """Report progress as a sign of the start, then sleep."""
    context.progress(0)
    await asyncio.sleep(seconds)
    return "slept"


@worker.task("hang")
def hang(context: Context) -> None:
    """Report progress as a sign of the start, then block the thread."""
    context.progress(0)
    time.sleep(3600)


if __name__ == "__main__":
    worker.run()
