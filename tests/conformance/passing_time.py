"""Time that passes by itself, and costs none: an event loop that jumps to the next date when there is nothing to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from taskqueue_core.clock import Timer

__all__ = ["LoopClock", "PassingLoop"]

_STEP = 0.0002
"""seconds that each round of the loop takes: about what a slow machine needs for it"""


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: the seconds that it was to wait are over at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, or let time pass."""
        self.seconds += _STEP
        ready = super().select(None if timeout is None else 0)
        self.seconds += 0 if ready else timeout or 0
        return ready


class PassingLoop(asyncio.SelectorEventLoop):
    """The event loop."""

    def __init__(self) -> None:
        """Start at zero."""
        self._passing = _Selector()
        super().__init__(self._passing)

    def time(self) -> float:
        """Return seconds."""
        return self._passing.seconds


class LoopClock:
    """The running loop's time, which no test can set."""

    def now(self) -> float:
        """Return Unix seconds."""
        return 1_000_000_000.0 + asyncio.get_running_loop().time()

    def call_at(self, when: float, callback: Callable[[], Any]) -> Timer:
        """Call back in the running loop."""
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)
