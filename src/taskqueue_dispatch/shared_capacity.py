"""Turns of the models that share a server, if it may run fewer jobs at once than they have slots there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from taskqueue_core.capabilities import SlotLease
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.registry import ModelRegistry

_PRECEDENCE_SECONDS = 0.05
"""minimum seconds for which the other models have precedence after a turn"""
_IDLE_FRACTION = 0.125
"""fraction of ``safety_pass`` for which an idle slot of a shared server is kept for the next job"""


class CapacityTurns:
    """One model's turns on the servers that it shares with other models. Does no I/O."""

    def __init__(
        self,
        registry: ModelRegistry,
        settings: DispatchSettings,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.idle = settings.safety_pass * _IDLE_FRACTION
        """seconds for which an idle slot of a shared server is kept for the next job"""
        self._registry = registry
        self._turn = settings.turn
        self._monotonic = monotonic
        self._turn_began: dict[str, float] = {}
        self._others_until = -math.inf

    @property
    def others_first(self) -> bool:
        """Return whether the other models currently have precedence: see `offer`."""
        return self._monotonic() < self._others_until

    def take(self, *leases: SlotLease) -> None:
        """Record acquired slots. A turn on a server begins with the first slot acquired there."""
        for lease in leases:
            self._turn_began.setdefault(lease.server, self._monotonic())

    def is_over(self, lease: SlotLease) -> bool:
        """Return whether the model's turn on the slot's server is over, and other models share the server."""
        now = self._monotonic()
        return now - self._turn_began.get(lease.server, now) >= self._turn and self.is_shared(lease)

    def offer(self, *leases: SlotLease) -> float:
        """Give the other models precedence, and return the number of seconds for which they have it.

        The next turn begins with the next acquired slot. If a slot's server has another model loaded, the precedence
        lasts longer: two models may each hold a slot on the server that has the other model loaded, and both then need
        time to release their slots.
        """
        for lease in leases:
            self._turn_began.pop(lease.server, None)
        seconds = _PRECEDENCE_SECONDS + 2 * self.idle * any(lease.switched for lease in leases)
        self._others_until = self._monotonic() + seconds
        return seconds

    def order(self, lease: SlotLease) -> tuple[int, bool]:
        """Return a sort key for slots. The slot that the pool would grant first has the smallest key."""
        view = self._registry.view(lease.model)
        known = () if view is None else view.endpoints
        own = (info.endpoint.priority for info in known if info.endpoint.server == lease.server)
        return -max(own, default=0), lease.switched

    def is_shared(self, lease: SlotLease) -> bool:
        """Return whether several models share the slot's server, and cannot use all their slots there at once."""
        endpoints = [
            info
            for view in self._registry.known()
            for info in view.endpoints
            if info.endpoint.server == lease.server and not (info.draining or info.removed)
        ]
        limits = [
            info.endpoint.together for info in endpoints if info.endpoint.together is not None
        ]
        slots = sum(info.endpoint.slots for info in endpoints)
        return len(endpoints) > 1 and bool(limits) and min(limits) < slots
