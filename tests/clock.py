"""An event loop with a fast clock: when no work is pending, the clock jumps to the next timer instead of waiting.

A test with the mark ``fast_clock`` runs on this loop if the ``conftest.py`` of its folder imports
`pytest_asyncio_loop_factories`. Such tests can use the time periods of production; these are exact, even on a busy
machine. The test may only wait for sockets, timers and threads of its own process, because the loop cannot see other
processes.
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
"""real seconds to wait for data that one socket of this process has sent to another"""
_STEP = 0.0002
"""seconds added to the clock in each iteration of the loop: about what an iteration takes on a slow machine"""
_EPOCH = time.time() - time.monotonic()


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop that really waits only for sockets and threads, and skips the time until the next timer."""

    def __init__(self) -> None:
        self.seconds = time.monotonic()
        self.in_threads = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Return the loop's own clock in seconds."""
        return self.seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a function in a thread. The clock does not jump until the function has returned."""
        self.in_threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    # no timeout parameter in Python 3.11
    async def shutdown_default_executor(self, *timeout: Any) -> None:
        """Wait until the executor's threads have ended. The clock does not jump meanwhile."""
        self.in_threads += 1
        await super().shutdown_default_executor(*timeout)

    def _returned(self, _: object) -> None:
        self.in_threads -= 1


class _Selector(selectors.DefaultSelector):
    """Selector that advances the loop's clock by the timeout instead of waiting for it."""

    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the sockets that are ready; if none is, advance the loop's clock."""
        self._loop.seconds += _STEP
        if timeout is None:
            return super().select(None)
        if self._loop.in_threads:
            began = time.monotonic()
            ready = super().select(timeout)
            self._loop.seconds += min(timeout, time.monotonic() - began)
            return ready
        # only the loop's own wake-up socket is registered
        without_sockets = len(self.get_map()) == 1
        ready = super().select(0 if without_sockets else min(timeout, _QUIET))
        if not ready:
            self._loop.seconds += timeout
        return ready


class LoopClock:
    """Clock for a backend that follows the time of the running event loop."""

    def now(self) -> float:
        """Return the current time as Unix seconds."""
        return _EPOCH + asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Schedule ``callback`` for the Unix time ``when``."""
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


def jump(seconds: float) -> None:
    """Advance the clock by ``seconds`` without running any callback, as if the process had been stopped meanwhile."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.seconds += seconds


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the event loop of a test: `JumpingLoop` if it has the mark ``fast_clock``, otherwise a normal one."""
    marked = item.get_closest_marker("fast_clock")
    return {"loop": JumpingLoop if marked else asyncio.new_event_loop}
