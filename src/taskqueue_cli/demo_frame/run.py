"""Running a demo as a command: its display, its exit code, and waiting for a state."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import typer

from taskqueue_cli.demo_frame.view import PlainView, view_for
from taskqueue_cli.output import FAILED, INTERRUPTED, note
from taskqueue_core.errors import TaskQueueError

T = TypeVar("T")
_POLL_SECONDS = 0.1


class DemoFailed(TaskQueueError):
    """The demo could not be finished. ``logs`` contains the last log lines of the process that failed."""

    code = "demo_failed"

    def __init__(self, message: str, *, logs: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.logs = logs
        self.exit_code = exit_code


def run_command(demo: Callable[[PlainView], Coroutine[Any, Any, None]], *, as_json: bool) -> None:
    """Run a demo. Exit with 1 if a check of its report fails, or with 130 if it is interrupted before the report."""
    view = view_for(as_json=as_json)
    try:
        asyncio.run(_interruptible(demo(view)))
    except DemoFailed as error:
        if error.logs:
            note(error.logs, "dim")
        raise
    except (asyncio.CancelledError, KeyboardInterrupt):
        if view.report is None:
            raise typer.Exit(INTERRUPTED) from None
    if view.report is not None and not view.report.ok:
        raise typer.Exit(FAILED)


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine so that SIGTERM and SIGHUP cancel it, as Ctrl-C does."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, task.cancel)
    return await task


async def wait_until(
    read: Callable[[], Awaitable[T]],
    reached: Callable[[T], bool],
    progress: Callable[[T], object],
    *,
    stall_seconds: float,
) -> T:
    """Call ``read`` repeatedly, and return the first state for which ``reached`` is true.

    Raises `DemoFailed` if the value of ``progress`` for the state does not change for ``stall_seconds``.
    """
    last, since = None, time.monotonic()
    while not reached(state := await read()):
        if (current := progress(state)) != last:
            last, since = current, time.monotonic()
        elif time.monotonic() - since > stall_seconds:
            raise DemoFailed(f"no progress for {stall_seconds:g} s")
        await asyncio.sleep(_POLL_SECONDS)
    return state
