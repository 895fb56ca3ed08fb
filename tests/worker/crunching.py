"""Declared tasks that run in child processes, for the tests of these."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from datetime import date
from pathlib import Path

import msgspec
import structlog

from taskqueue_core import Context, Queue, Reject, Retry, Tasks, WouldBlock
from taskqueue_memory import MemoryBackend

tasks = Tasks()
_log = logging.getLogger("shop")


@tasks.lifespan
async def lifespan() -> AsyncIterator[str]:
    """Yield the process id as text, and log at the end."""
    yield f"state of {os.getpid()}"
    _log.info("closed in %d", os.getpid())


@tasks.task(run="process")
def pid(context: Context[str], day: date = date(2026, 1, 1)) -> list[object]:
    """Return the process id, and whether the state is the one of the process."""
    assert isinstance(day, date)
    return [os.getpid(), context.state == f"state of {os.getpid()}"]


@tasks.task(run="process")
async def coroutine() -> int:
    """Return the process id, from a coroutine."""
    return os.getpid()


@tasks.task(run="process")
async def wait() -> str:
    """Wait for a task that never runs, on a connection of this process."""
    handle = await coroutine.using(on=Queue(MemoryBackend())).publish()
    try:
        return str(await handle.result(5))
    except WouldBlock:
        return "refused"


@tasks.task(run="process", timeout=30)
def die(how: str) -> None:
    """End the process."""
    if how == "exit":
        os._exit(9)
    if how == "sys.exit":
        sys.exit(7)
    os.kill(os.getpid(), signal.SIGSEGV)


@tasks.task(run="process", timeout=60)
def start_a_process(path: str, end: bool) -> None:  # noqa: FBT001
    """Start a process that holds a named pipe open; end this one, or wait for the other."""
    with Path(path).open("w") as pipe:

        def hold() -> None:
            print("started", file=pipe, flush=True)
            time.sleep(90)

        process = multiprocessing.get_context("fork").Process(target=hold)
        process.start()
        if end:
            os._exit(7)
        process.join()


def _hang(context: Context) -> None:
    context.progress(str(os.getpid()))
    while True:
        pass


hang = tasks.task("hang", run="process")(_hang)
hang_briefly = tasks.task("hang_briefly", run="process", timeout=0.2)(_hang)
hang_in_vain = tasks.task(
    "hang_in_vain", run="process", timeout=0.2, on_error={TimeoutError: Reject("too_slow")}
)(_hang)


@tasks.task(run="process")
def end(how: str) -> None:
    """Log, and end with an exception."""
    _log.info("ending by %s", how, extra={"width": 3, "way": {how}})
    structlog.get_logger("shop").info("also")
    if how == "retry":
        raise Retry(5, "later")
    if how == "reject":
        raise Reject("bad")
    raise ValueError(how)


class _NoText:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@tasks.task(run="process")
def log_anything() -> list[str]:
    """Log what handlers of logging report as errors, and what MessagePack cannot express."""
    endless: list[object] = []
    endless.append(endless)
    _log.info("count %d", "x")
    _log.info({"plain": "dict"})
    raw = msgspec.Raw(b'{"a": 1}')
    values = {"many": [2**70, "\udcff"], "endless": endless, "bad": _NoText(), "raw": raw}
    _log.info("\udcff", extra=values)
    _log.info("raw", extra={"raw": raw})
    return ["done"]


@tasks.task(run="process")
def fail_with(text: str) -> None:
    """Fail with a text in which a lone surrogate follows."""
    raise ValueError(text + "\udcff")


@tasks.task(run="process")
def progress_with(text: str, context: Context) -> str:
    """Report a text in which a lone surrogate follows as progress, and return it."""
    context.progress(text + "\udcff")
    return text + "\udcff"


@tasks.task(run="process")
async def publish_in_process() -> str:
    """Publish another task, without a connection that the application opens."""
    return (await coroutine.using(id="from-a-child").publish()).id


@tasks.task(run="process")
def publish_sync_in_process() -> str:
    """Publish another task, from a thread."""
    return coroutine.using(id="from-a-thread").publish_sync().id
