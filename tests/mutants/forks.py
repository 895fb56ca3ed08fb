"""Forked processes that report to the one that forked them."""

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
"""sends what it is called with"""


class Fork:
    """A copy of this process that runs a function, which gets a `Report`. Leaving the context kills what still runs."""

    def __init__(self, function: Callable[[Report], None]) -> None:
        self.pipe, end = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # of threads: those of a fixture, which the copy does not need
            self._pid = os.fork()
        if not self._pid:
            _carry_out(function, end)
        end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A process that its copy started may still be there: they are one group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)  # it may not have made its group yet
        os.waitpid(self._pid, 0)
        self.pipe.close()

    def next(self, seconds: float | None) -> tuple[Any, ...] | None:
        """Return what comes next, or nothing if the process has ended. Raises `TimeoutError`."""
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
    except BaseException:  # noqa: BLE001 - the traceback is in the output, and the process ends here
        traceback.print_exc(file=sys.stdout)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)
