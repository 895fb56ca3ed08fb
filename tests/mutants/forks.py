"""Forked child processes that send reports to their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

Report = Callable[..., None]
"""function that sends its arguments to the parent process"""


class Fork:
    """A forked child process that runs a function with a `Report`. Leaving the context kills the process."""

    def __init__(self, function: Callable[[Report], None]) -> None:
        self.pipe, end = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the child does not need the threads of fixtures, about which Python warns
            self._pid = os.fork()
        if not self._pid:
            _carry_out(function, end)
        end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Kill the process group, because the child may have started other processes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            # The child may not have created its process group yet.
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self.pipe.close()

    def next(self, seconds: float | None) -> tuple[Any, ...] | None:
        """Return the next report, or None if the process has ended. Raises `TimeoutError`."""
        if not self.pipe.poll(seconds):
            raise TimeoutError
        try:
            received: tuple[Any, ...] = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return received


def _carry_out(function: Callable[[Report], None], end: Connection) -> None:
    os.setsid()
    code = 1
    try:
        function(lambda *what: end.send(what))
        code = 0
    except BaseException:  # noqa: BLE001 - the traceback goes to the output, and then the process ends
        traceback.print_exc(file=sys.stdout)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)
