"""The settings of a queue that the model uses."""

from __future__ import annotations

from typing import NamedTuple


class Flow(NamedTuple):
    """The limits of a queue, and how many rate limit tokens are left."""

    capacity: float = 0
    max_inflight: float = 0
    max_tokens: float = 0
    period: float = 0
    paused: float = 0
    intake_paused: float = 0
    tokens: float = 0
    at: float = 0

    @property
    def limited(self) -> bool:
        """Whether the queue has any limit."""
        return any(self[:6])


class Terms(NamedTuple):
    """The settings of a queue that the model uses."""

    window: int = 300_000_000
    max_losses: int = 5
    result_ttl: int = 3_600_000_000
    replicas: int = 0
    flow: Flow = Flow()
    names: frozenset[str] = frozenset()
    """names of the tags by which tasks are found"""
    keep: int = 0
    """microseconds for which ended tasks are kept, if that is longer than the window"""
    most: int = 0
    """maximum number of tasks of each state that are kept for longer than the window"""

    @property
    def kept(self) -> int:
        """Return for how long ended tasks are kept."""
        return max(self.window, self.keep)
