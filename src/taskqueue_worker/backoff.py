"""How long to wait before connecting again."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """At once the first time, then ``base``, doubled each time up to ``cap``; each wait is 50 to 100 % of that."""

    def __init__(
        self, base: float = 0.1, cap: float = 5.0, uniform: Callable[[], float] = random.random
    ) -> None:
        """Seconds; ``uniform`` gives 0 <= x < 1."""
        self._base = base
        self._cap = cap
        self._uniform = uniform
        self._tries = 0

    def next(self, *, at_once: bool = True) -> float:
        """Return the seconds to wait before the next try. ``at_once=False`` leaves out the first, immediate one."""
        if self._tries == 0:
            self._tries = 1
            if at_once:
                return 0.0
        wait = min(self._cap, self._base * 2.0 ** min(self._tries - 1, 30))
        self._tries += 1
        return wait * (0.5 + self._uniform() / 2)

    def reset(self, *, at_once: bool = True) -> None:
        """Start again: the connection was good. ``at_once=False`` starts at the first wait."""
        self._tries = 0 if at_once else 1
