"""Clocks for backends whose store is in this process. Tests use a manual clock in place of the system clock."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from time import monotonic, time
from typing import Protocol


class Timer(Protocol):
    """A handle that can cancel a callback, returned by `Clock.call_at`."""

    def cancel(self) -> None:
        """Cancel the callback. Does nothing if it has already run."""


class Clock(Protocol):
    """A source of time, which can also run callbacks at given times."""

    def now(self) -> float:
        """Return the time in Unix seconds. It never decreases within one process."""

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run the callback once in the running event loop, at ``when`` or as soon as possible afterwards."""


class SystemClock:
    """A clock that reads the system's time once and then uses the monotonic clock, so it ignores later time changes."""

    def __init__(self) -> None:
        self._anchor = time() - monotonic()

    def now(self) -> float:
        """Return the time in Unix seconds."""
        return self._anchor + monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run the callback once in the running event loop, at ``when`` or at once if ``when`` has passed."""
        delay = max(0.0, when - self.now())
        return asyncio.get_running_loop().call_later(delay, callback)


class ManualClock:
    """A clock for tests, whose time changes only by `advance`. It starts at ``start``, in Unix seconds."""

    def __init__(self, start: float = 1_000_000_000.0) -> None:
        self._now = start
        self._calls: list[tuple[float, int, _ManualTimer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Return the time in Unix seconds."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run the callback once, during the call of `advance` that reaches ``when``."""
        timer = _ManualTimer(callback)
        heapq.heappush(self._calls, (when, next(self._order), timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Advance the time, run the callbacks that become due, earliest first, and let woken coroutines run."""
        await self.advance_to(self._now + seconds)

    async def advance_to(self, end: float) -> None:
        """Advance the time to ``end``, in Unix seconds, as `advance` does. Has no effect on a time that has passed."""
        while self._calls and self._calls[0][0] <= end:
            when, _, timer = heapq.heappop(self._calls)
            self._now = max(self._now, when)
            timer.fire()
        self._now = max(self._now, end)
        # A woken coroutine may wake another coroutine, and so on. No backend needs more than five such steps.
        for _ in range(5):
            await asyncio.sleep(0)


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        if self._callback is not None:
            self._callback()
