"""The states of tasks."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a task in its queue. `docs/lifecycle.md` has a diagram of the transitions.

    >>> State("in_flight").live, State.DONE.live
    (True, False)
    """

    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    DONE = "done"
    DEAD = "dead"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DISCARDED = "discarded"

    @property
    def live(self) -> bool:
        """Whether a task in this state may still be delivered."""
        return self in _LIVE


_LIVE = (State.BLOCKED, State.SCHEDULED, State.WAITING, State.IN_FLIGHT)
