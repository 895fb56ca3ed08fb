"""An event loop for tests that would only wait: where nothing is left to do, its clock jumps to the next timer.

``@pytest.mark.fast_clock`` gives a test such a loop. Periods in it may be as long as in production and are exact,
however busy the machine is. All that it waits for must be in its own process: sockets, timers and threads of its loop.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

import pytest

__all__ = ["JumpingLoop", "LoopClock", "jump", "pytest_asyncio_loop_factories"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_QUIET = 0.005
"""seconds in which what one socket was given arrives at another"""


class JumpingLoop(asyncio.SelectorEventLoop):
    """Waits for nothing but sockets and threads."""

    def __init__(self) -> None:
        super().__init__(_Selector(self))
        self.ahead = 0.0
        """seconds that were jumped over"""
        self.in_threads = 0

    def time(self) -> float:
        """Return seconds of this loop's own clock."""
        return super().time() + self.ahead

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a function in a thread. The clock does not jump before its end."""
        self.in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: object) -> None:
        self.in_threads -= 1


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= _QUIET or self._loop.in_threads:
            return super().select(timeout)
        ready = super().select(_QUIET)
        if not ready:
            self._loop.ahead += timeout - _QUIET
        return ready


class LoopClock:
    """The clock of a backend, which goes as that of the running loop does."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._anchor = time.time() - self._loop.time()

    def now(self) -> float:
        """Return Unix seconds."""
        return self._anchor + self._loop.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back at a time."""
        return self._loop.call_later(max(0.0, when - self.now()), callback)


def jump(seconds: float) -> None:
    """Let time pass in which nothing runs, as in a process that is stopped."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.ahead += seconds


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give a test that is marked its loop."""
    marked = item.get_closest_marker("fast_clock")
    return {"loop": JumpingLoop if marked else asyncio.new_event_loop}
