"""Servers that run no more jobs at once than some of their models have slots: no model keeps one from the others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from taskqueue_core.capabilities import SlotLease
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.registry import ModelRegistry

_AHEAD = 0.05
"""seconds for which the other models go first"""
_IDLE = 0.125
"""of the safety pass: how long a slot of such a server is kept for a job that may come"""


class CapacityTurns:
    """One model's turns on the servers that it shares. No input or output."""

    def __init__(
        self,
        registry: ModelRegistry,
        settings: DispatchSettings,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without any."""
        self.idle = settings.safety_pass * _IDLE
        """seconds for which a slot of a shared server is kept without a job"""
        self._registry = registry
        self._turn = settings.turn
        self._monotonic = monotonic
        self._begun: dict[str, float] = {}
        self._until = -math.inf

    @property
    def others_first(self) -> bool:
        """Whether something was offered just now."""
        return self._monotonic() < self._until

    def take(self, *leases: SlotLease) -> None:
        """Note slots that were taken: the turn at a server begins with the first one."""
        for lease in leases:
            self._begun.setdefault(lease.server, self._monotonic())

    def is_over(self, lease: SlotLease) -> bool:
        """Whether a slot that is free is the others' to take: its server is shared, and had this model for a turn."""
        now = self._monotonic()
        return now - self._begun.get(lease.server, now) >= self._turn and self.is_shared(lease)

    def offer(self, *leases: SlotLease) -> float:
        """Let the other models go first, from now on for the seconds that this returns.

        The next turn begins with the next slot taken. Where another model is loaded that one gets more time: of two
        that keep a slot of each other's server, both let go of it.
        """
        for lease in leases:
            self._begun.pop(lease.server, None)
        ahead = _AHEAD + 2 * self.idle * any(lease.switched for lease in leases)
        self._until = self._monotonic() + ahead
        return ahead

    def merit(self, lease: SlotLease) -> tuple[int, bool]:
        """Return what slots in hand are used by, the least first: as the pool gives them."""
        view = self._registry.view(lease.model)
        known = () if view is None else view.endpoints
        matches = [
            endpoint.endpoint.priority
            for endpoint in known
            if endpoint.endpoint.server == lease.server
        ]
        return -max(matches, default=0), lease.switched

    def is_shared(self, lease: SlotLease) -> bool:
        """Whether models of its server can be kept waiting by one of them."""
        there = [
            info
            for view in self._registry.known()
            for info in view.endpoints
            if info.endpoint.server == lease.server and not (info.draining or info.removed)
        ]
        limits = [info.endpoint.together for info in there if info.endpoint.together is not None]
        slots = sum(info.endpoint.slots for info in there)
        return len(there) > 1 and bool(limits) and min(limits) < slots
