"""A worker in a process of its own, for tests that end it the hard way. Its argument is the server's address."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time

from taskqueue_worker import Context, Worker

logging.basicConfig(level=logging.INFO)
worker = Worker(sys.argv[1], grace=float(sys.argv[2]) if len(sys.argv) > 2 else 5.0)


@worker.task("exit")
def exit_hard() -> None:
    """End without a word."""
    os._exit(9)


@worker.task("kill")
def kill() -> None:
    """End as by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)


@worker.task("sys.exit")
async def exit_softly() -> None:
    """End as if all were well."""
    sys.exit(7)


@worker.task("sys.exit.thread")
def exit_from_thread() -> None:
    """End as if all were well, from a thread."""
    sys.exit(7)


@worker.task("interrupt")
async def interrupt() -> None:
    """Do as an operator's Ctrl-C that hits the handler."""
    raise KeyboardInterrupt


@worker.task("sleep")
async def sleep(seconds: float, context: Context) -> str:
    """Take a while, and say when it begins."""
    context.progress(0)
    await asyncio.sleep(seconds)
    return "slept"


@worker.task("hang")
def hang(context: Context) -> None:
    """Never end, and say when it begins."""
    context.progress(0)
    time.sleep(3600)


if __name__ == "__main__":
    worker.run()
