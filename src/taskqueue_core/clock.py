"""Time, injectable: the store's clock of a backend that lives in this process."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that was put off."""

    def cancel(self) -> None:
        """Forget the call. Harmless when it has run already."""
        ...


class Clock(Protocol):
    """A clock that also calls back at a given time."""

    def now(self) -> float:
        """Return Unix seconds. Never goes backwards within one process."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back once, at ``when`` or as soon as possible after, in the running event loop."""
        ...


class SystemClock:
    """Wall-clock time read once, then advanced by the monotonic clock: a step of the wall clock changes nothing."""

    def __init__(self) -> None:
        """Anchor the clock at the present wall-clock time."""
        self._anchor = time.time() - time.monotonic()

    def now(self) -> float:
        """Return Unix seconds."""
        return self._anchor + time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back in the running event loop; early wake-ups of the loop's own clock are rounded up."""
        delay = max(0.0, when - self.now())
        return asyncio.get_running_loop().call_later(delay, callback)


class ManualClock:
    """A clock for tests: time changes only by `advance`."""

    def __init__(self, start: float = 1_000_000_000.0) -> None:
        """Start at ``start``, Unix seconds."""
        self._now = start
        self._calls: list[tuple[float, int, _ManualTimer]] = []
        self._order = itertools.count()

    def now(self) -> float:
        """Return Unix seconds."""
        return self._now

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back during the `advance` that reaches ``when``."""
        timer = _ManualTimer(callback)
        heapq.heappush(self._calls, (when, next(self._order), timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Move time forward, run what falls due in order, and let woken tasks run."""
        end = self._now + seconds
        while self._calls and self._calls[0][0] <= end:
            when, _, timer = heapq.heappop(self._calls)
            self._now = max(self._now, when)
            timer.fire()
        self._now = end
        # a woken task may wake another; five hops are more than any backend's chain
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
