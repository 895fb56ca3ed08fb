"""An event loop whose time costs none: when there is nothing to do it jumps to the next date.

A test with the mark ``passing_time`` runs on it, in folders whose ``conftest.py`` imports the hook below. It is for
what lives in one event loop: a thread, a process or a socket takes real time, which such a loop does not wait for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import pytest

from taskqueue_core.clock import Timer

__all__ = ["LoopClock", "PassingLoop", "pytest_asyncio_loop_factories"]

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


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the event loop of a test."""
    passing = item.get_closest_marker("passing_time") is not None
    return {"loop": PassingLoop if passing else asyncio.new_event_loop}
