"""An event loop for tests that would only wait: where nothing is left to do, its clock jumps to the next timer.

A test with the mark ``fast_clock`` runs on such a loop, in folders whose ``conftest.py`` imports the hook below.
Periods in it may be as long as in production and are exact, however busy the machine is. All that it waits for must be
in its own process: sockets, timers and threads of its loop.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

import pytest

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_QUIET = 0.005
"""real seconds in which what one socket was given arrives at another"""
_STEP = 0.0002
"""seconds that each round of the loop takes: about what a slow machine needs for it"""
_EPOCH = time.time() - time.monotonic()


class JumpingLoop(asyncio.SelectorEventLoop):
    """Waits for nothing but sockets and threads."""

    def __init__(self) -> None:
        self.seconds = time.monotonic()
        self.in_threads = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Return seconds of this loop's own clock."""
        return self.seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a function in a thread. The clock does not jump before its end."""
        self.in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    async def shutdown_default_executor(self, *timeout: Any) -> None:  # none in Python 3.11
        """Wait for the ends of the threads, in which the clock does not jump either."""
        self.in_threads += 1
        await super().shutdown_default_executor(*timeout)

    def _returned(self, _: object) -> None:
        self.in_threads -= 1


class _Selector(selectors.DefaultSelector):
    """Takes the seconds that it was to wait from the loop's clock alone."""

    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, or let time pass."""
        self._loop.seconds += _STEP
        if timeout is None:
            return super().select(None)
        if self._loop.in_threads:
            began = time.monotonic()
            ready = super().select(timeout)
            self._loop.seconds += min(timeout, time.monotonic() - began)
            return ready
        without_sockets = len(self.get_map()) == 1  # what wakes the loop itself
        ready = super().select(0 if without_sockets else min(timeout, _QUIET))
        if not ready:
            self._loop.seconds += timeout
        return ready


class LoopClock:
    """The clock of a backend, which goes as that of the running loop does."""

    def now(self) -> float:
        """Return Unix seconds."""
        return _EPOCH + asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Call back at a time."""
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


def jump(seconds: float) -> None:
    """Let time pass in which nothing runs, as in a process that is stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.seconds += seconds


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give a test that is marked its loop."""
    marked = item.get_closest_marker("fast_clock")
    return {"loop": JumpingLoop if marked else asyncio.new_event_loop}
