"""The server's time, as well as a client can know it."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["TIME_HEADER", "RemoteClock"]

TIME_HEADER = "taskqueue-time"
"""an answer's header: the store's time when it was made, Unix seconds"""

_DRIFT = 1e-4
"""how far two clocks may run apart, per second"""


class RemoteClock:
    """Keeps the best estimate heard so far: the one whose question was answered quickest.

    An estimate ages, so that a fresh one wins in the end. Before the first answer it is the system's clock.
    """

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        system: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._offset = system() - monotonic()
        self._doubt = float("inf")
        self._heard = monotonic()

    def now(self) -> float:
        """Return Unix seconds of the store's clock."""
        return self._offset + self._monotonic()

    def hear(self, header: str | None, asked: float) -> None:
        """Learn from the answer, just in, to a question asked at monotonic time ``asked``."""
        if header is None:
            return
        try:
            told = float(header)
        except ValueError:
            return
        here = self._monotonic()
        doubt = (here - asked) / 2
        if doubt > self._doubt + (here - self._heard) * _DRIFT or not 0 < told < float("inf"):
            return
        self._offset, self._doubt, self._heard = told - (asked + here) / 2, doubt, here
